"""The package as users get it: a wheel and an editable install, each in a clean environment.

Both must put `kernels/` and `patches/` inside the `dmuon_megatron` namespace and import without
torch or Megatron. Neither needs the network.
"""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[1]
# folder of the repository -> package it is installed as
PACKAGES = {
    "dmuon_megatron": "dmuon_megatron",
    "kernels": "dmuon_megatron/kernels",
    "patches": "dmuon_megatron/patches",
}

IMPORT_BOTH = """
import dmuon_megatron, dmuon_megatron.kernels, dmuon_megatron.patches
import importlib.util, sys
for name in ("torch", "megatron"):
    assert importlib.util.find_spec(name) is None, f"{name} is there: the environment is not clean"
for name in ("kernels", "patches"):
    assert importlib.util.find_spec(name) is None, f"a top-level {name} can be imported"
for module in (dmuon_megatron, dmuon_megatron.kernels, dmuon_megatron.patches):
    print(module.__file__)
"""


def run(*command, **kwargs):
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(python, *arguments, **kwargs):
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return run(*command, "--quiet", "--no-deps", "--no-index", **kwargs)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources, so that no build folder lands in, or is reused from, the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=unwanted)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-build-isolation", "--wheel-dir", target, checkout)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture
def clean_python(tmp_path):
    """The interpreter of a new virtual environment that has pip and nothing else."""
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    return tmp_path / "venv" / "bin" / "python"


def installed_names(python):
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return {path.name for path in Path(run(python, "-c", query).strip()).iterdir()}


def test_wheel_holds_every_module_of_the_repository(wheel, checkout):
    """A package missing from pyproject's list would be missing from the wheel only."""
    expected = {
        f"{package}/{path.relative_to(checkout / folder).as_posix()}"
        for folder, package in PACKAGES.items()
        for path in (checkout / folder).rglob("*")
        if path.suffix in {".py", ".patch"}
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    missing = sorted(expected - held)
    assert not missing, f"add their packages to [tool.setuptools] in pyproject.toml: {missing}"
    assert held == expected


def test_wheel_imports_without_dependencies_and_adds_no_top_level_kernels(
    wheel, clean_python, tmp_path
):
    pip(clean_python, "install", wheel)
    files = run(clean_python, "-I", "-c", IMPORT_BOTH, cwd=tmp_path).split()
    assert all("site-packages/dmuon_megatron/" in file for file in files), files
    assert not {"kernels", "patches"} & installed_names(clean_python)


def test_editable_install_imports_both_folders_from_the_checkout(checkout, clean_python, tmp_path):
    # An editable build without isolation runs setuptools in the target environment; lend it ours.
    lent = tmp_path / "lent"
    lent.mkdir()
    for package in Path(setuptools.__file__).parents[1].iterdir():
        if package.name.startswith(("setuptools", "_distutils_hack", "pkg_resources")):
            (lent / package.name).symlink_to(package)
    command = ("install", "--no-build-isolation", "--editable", checkout)
    pip(clean_python, *command, env={"PYTHONPATH": str(lent)})

    files = run(clean_python, "-I", "-c", IMPORT_BOTH, cwd=tmp_path).split()
    assert files == [str(checkout / folder / "__init__.py") for folder in PACKAGES]
    # a module that appears later is seen without installing again
    for folder, package in PACKAGES.items():
        (checkout / folder / "appeared_later.py").touch()
        module = package.replace("/", ".") + ".appeared_later"
        run(clean_python, "-I", "-c", f"import {module}", cwd=tmp_path)
        (checkout / folder / "appeared_later.py").unlink()
    assert not {"kernels", "patches"} & installed_names(clean_python)
