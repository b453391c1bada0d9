"""Install one release of torch without the gigabytes of CUDA: `python ops/dev/torch_without_cuda.py 2.11.0`.

Use this script for tests on a machine without a GPU, if the package index has no CPU build of the release.
The script installs into the environment of the python that runs it, and needs gcc and readelf.

The script installs the release's own wheel without its dependencies on CUDA and triton. The wheel links
libraries of CUDA. In place of each, the script compiles a small library, whose functions all answer that
there is no device.
"""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
CUDA_PACKAGES = ("cuda-", "nvidia-", "triton")


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed_by(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "-Wd", str(library)))


def symbols(library: Path) -> tuple[set[str], set[str]]:
    """Return the names that the library defines, and those of other libraries as ``name@version``."""
    defined, wanted = set(), set()
    for line in output_of("readelf", "-W", "--dyn-syms", str(library)).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit() or fields[4] != "GLOBAL":
            continue
        if fields[6] == "UND":
            wanted.add(fields[7])
        else:
            defined.add(fields[7].partition("@")[0])
    return defined, wanted


def versions_of(library: Path) -> dict[str, str]:
    """Return which needed library defines each version of a symbol."""
    found, file = {}, ""
    for line in output_of("readelf", "-WV", str(library)).splitlines():
        if match := re.search(r"Version: 1\s+File: (\S+)", line):
            file = match[1]
        elif file and (match := re.search(r"Name: (\S+)\s+Flags:", line)):
            found[match[1]] = file
    return found


def compile_library(target: Path, versions: dict[str, set[str]]) -> None:
    """Compile a library that defines each name of each version; the version "" stands for none."""
    code = [".text"]
    for name in sorted(set[str]().union(*versions.values())):
        code += [f".globl {name}", f".type {name},@function", f"{name}:"]
    code += [f"movl ${NO_DEVICE}, %eax", "ret", '.section .note.GNU-stack,"",@progbits', ""]
    script = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
        for version, names in versions.items()
        if version
    )
    with tempfile.TemporaryDirectory() as folder:
        source, map_file = Path(folder, "answers.s"), Path(folder, "versions")
        source.write_text("\n".join(code))
        map_file.write_text(script)
        command = [
            "gcc",
            "-shared",
            "-nostdlib",
            f"-Wl,-soname,{target.name}",
            "-o",
            str(target),
            str(source),
        ]
        subprocess.run([*command, *([f"-Wl,--version-script={map_file}"] if script else [])], check=True)


def replace_cuda(folder: Path) -> list[str]:
    """Compile the missing libraries of the torch in this folder into it; return their names."""
    libraries = [*folder.glob("lib/*.so*"), *folder.glob("*.so")]
    system = set(re.findall(r"^\s+(\S+) \(", output_of("/sbin/ldconfig", "-p"), re.MULTILINE))
    needed = {name for library in libraries for name in needed_by(library)}
    missing = needed - system - {library.name for library in libraries}
    if not missing:
        return []
    defined: set[str] = set()
    unversioned: set[str] = set()
    wanted: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for library in libraries:
        owners = versions_of(library)
        own, others = symbols(library)
        defined |= own
        for name, _, version in (symbol.partition("@") for symbol in others):
            if not version:
                unversioned.add(name)
            elif owners.get(version) in missing:
                wanted[owners[version]][version].add(name)
    # The python program itself has its own names, and the loader asks the program first.
    wanted[min(missing)][""] |= {n for n in unversioned - defined if not n.startswith(("Py", "_Py"))}
    for name, versions in wanted.items():
        compile_library(folder / "lib" / name, versions)
    return sorted(missing)


def forget_cuda_packages(metadata: Path) -> None:
    """Drop the packages of CUDA from the wheel's dependencies, or the next `pip install` brings them."""
    drop = tuple(f"Requires-Dist: {name}" for name in CUDA_PACKAGES)
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(line for line in lines if not line.startswith(drop)))


def main(release: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "--no-cache-dir", "--no-deps", f"torch=={release}"], check=True)
    torch = importlib.metadata.distribution("torch")
    names = replace_cuda(Path(torch.locate_file("torch")))
    forget_cuda_packages(Path(torch.locate_file(f"torch-{torch.version}.dist-info")) / "METADATA")
    sys.stdout.write(f"torch {torch.version} without {', '.join(names)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
