#!/usr/bin/env bash
# What the tests against foreign clients need: a virtual environment of its own, and three Debian packages.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-clients
if [ ! -f "$venv/.installed" ] || [ tests/clients/requirements.txt -nt "$venv/.installed" ]; then
    test -x "$venv/bin/python" || python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
    # Ray's processes run this package, with what the project's own environment has
    own=$("${PYTHON:-.venv/bin/python}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    for site in "$venv"/lib/python*/site-packages; do
        echo "import site; site.addsitedir('$own')" > "$site/depthbatch_project.pth"
    done
    touch "$venv/.installed"
fi
missing=()
command -v promtool >/dev/null || missing+=(prometheus)
command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
command -v chromedriver >/dev/null || missing+=(chromium-driver)
if [ ${#missing[@]} -gt 0 ]; then
    sudo=()
    [ "$(id -u)" = 0 ] || sudo=(sudo)
    "${sudo[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
