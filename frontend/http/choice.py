"""One choice of an answer, whole or piece by piece, apart from its text. Knows which extras were asked for."""

from dataclasses import dataclass, field
from typing import Any

from depthbatch.frontend.http.generation import Piece
from depthbatch.frontend.http.logprobs import LogprobFormat


@dataclass
class Choice:
    """``news`` for streams, ``add`` and ``fields`` for plain answers."""

    index: int
    with_depths: bool
    with_tokens: bool
    logprob_format: LogprobFormat | None
    _pieces: list[Piece] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def fields(self) -> dict[str, Any]:
        """Everything that was added."""
        return self._fields(self._pieces)

    def news(self, piece: Piece) -> dict[str, Any]:
        """One event's part."""
        return self._fields([piece])

    def _fields(self, pieces: list[Piece]) -> dict[str, Any]:
        last = pieces[-1]
        fields: dict[str, Any] = {
            "index": self.index,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
            "logprobs": None,
        }
        if self.logprob_format is not None:
            prompt = [entry for piece in pieces for entry in piece.prompt_logprobs]
            output = [entry for piece in pieces for entry in piece.logprobs]
            fields["logprobs"] = self.logprob_format(prompt, output)
        if self.with_depths:
            fields["exit_depths"] = [depth for piece in pieces for depth in piece.exit_depths]
        if self.with_tokens:
            fields["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        return fields
