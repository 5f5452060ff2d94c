"""Random draws are pure functions of (seed, position, lane) and behave like independent uniforms."""

import torch

from depthbatch.common.splitmix64 import mix_int
from depthbatch.worker.sampling.random_numbers import mix64, uniform

MASK = (1 << 64) - 1
COUNT = 1 << 18


def splitmix_mixer(x: int) -> int:
    """The published finaliser in Python's unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draws(seed: int = 7, position: int = 3, first_lane: int = 0, count: int = COUNT) -> torch.Tensor:
    lanes = torch.arange(first_lane, first_lane + count)
    return uniform(torch.tensor(seed), torch.tensor(0), torch.tensor(position), lanes)


def test_mixer_wraps_like_unsigned_64_bit() -> None:
    """Guards against arithmetic shifts or saturating products; the oracle computes in Python integers."""
    values = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF, -0x123456789ABCDEF]
    mixed = mix64(torch.tensor(values)).tolist()
    want = [splitmix_mixer(v & MASK) for v in values]
    assert [m & MASK for m in mixed] == want
    assert [mix_int(v) for v in values] == want


def test_open_interval_and_moments() -> None:
    """Mean, variance and a 64-bin chi-square within five standard errors, over lanes, positions and seeds alike."""
    axis = torch.arange(COUNT)
    zero = torch.tensor(0)
    for name, values in (
        ("lanes", draws()),
        ("positions", uniform(torch.tensor(7), zero, axis, 0)),
        ("seeds low", uniform(axis.int(), zero, zero, 0)),
        ("seeds high", uniform(zero, axis.int(), zero, 0)),
    ):
        assert values.min() > 0.0 and values.max() < 1.0, name
        assert abs(values.mean().item() - 0.5) < 5 * (1 / 12 / COUNT) ** 0.5, name
        assert abs(values.double().var().item() - 1 / 12) < 5 * (1 / 180 / COUNT) ** 0.5, name
        counts = torch.histc(values, bins=64, min=0, max=1).double()
        chi_square = ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum().item()
        assert abs(chi_square - 63) < 5 * (2 * 63) ** 0.5, name


def test_neighbours_are_uncorrelated() -> None:
    """Neighbouring lanes, positions and seeds (and position + 1 against lane + 1) show no correlation."""
    base = draws()
    others = {
        "lane": draws(first_lane=1),
        "position": draws(position=4),
        "seed": draws(seed=8),
        "position back, lane on": draws(position=2, first_lane=1),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack((base, other)))[0, 1].item()
        assert abs(correlation) < 5 / COUNT**0.5, name


def test_function_of_its_arguments_only() -> None:
    """A row drawn in a batch equals the row drawn alone, for int32 bit patterns of the seed too."""
    seeds = torch.tensor([1, -5, 2**31 - 1], dtype=torch.int32)
    positions = torch.tensor([0, 9, 4000], dtype=torch.int32)
    lanes = torch.arange(50)
    batch = uniform(seeds[:, None], seeds[:, None], positions[:, None], lanes)
    for row in range(3):
        alone = uniform(seeds[row], seeds[row], positions[row], lanes)
        assert torch.equal(batch[row], alone)
    unsigned = uniform(torch.tensor((-5) & 0xFFFFFFFF), torch.tensor(-5), torch.tensor(9), lanes)
    assert torch.equal(batch[1], unsigned)


def test_no_host_synchronisation() -> None:
    """Runs on fake cuda tensors, where a hidden .item() or a tensor on the wrong device raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False):
        seed = torch.zeros(4, dtype=torch.int32, device="cuda")
        out = uniform(seed, seed, seed, 0)
        assert out.device.type == "cuda" and out.dtype == torch.float32 and out.shape == (4,)
