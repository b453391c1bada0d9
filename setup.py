"""The one part of fabric that is compiled: the moves of pieces between sockets and memory."""

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext


def need_compiler() -> None:
    """End with a sentence where nothing can be compiled, before anything is built."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        raise SystemExit(
            f"fabric needs a C compiler, and there is no {compiler.split()[0]}: install gcc (Debian and "
            "Ubuntu: apt install build-essential), or name another compiler in CC, and install fabric again"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise SystemExit(
            "fabric needs the headers of this Python, and there is no Python.h: install them (Debian and "
            "Ubuntu: apt install python3-dev), and install fabric again"
        )


class Build(build):
    """Builds everything, but only with a compiler."""

    def run(self) -> None:
        need_compiler()
        super().run()


class BuildExtension(build_ext):
    """Compiles; an editable install runs this command alone."""

    def run(self) -> None:
        need_compiler()
        super().run()


setup(
    cmdclass={"build": Build, "build_ext": BuildExtension},
    ext_modules=[
        Extension(
            "fabric.ftar.host.piece_moves",
            ["fabric/ftar/host/piece_moves.c"],
            py_limited_api=True,
            # Sums keep the bits that reduce_ops.py gives them: no fused multiplication and addition.
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
