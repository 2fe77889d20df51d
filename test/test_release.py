"""What a release states about itself: its version, its metadata and its links, which an index must be able to show."""

import configparser
import re

import release
import yaml
from documents import ROOT

import variable_batch_size as vbs

REPOSITORY = "https://example.org/owner/name"


def test_all_files_name_the_same_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == vbs.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == vbs.__version__
    assert release.version_of(ROOT) == vbs.__version__


def test_metadata_names_the_tested_versions_of_python():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    metadata = setup["metadata"]
    assert metadata["license"] == yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"]
    assert setup["options"]["python_requires"] == ">=3.10"
    versions = re.findall(r"Python :: (3\.\d+)", metadata["classifiers"])
    assert versions == ["3.10", "3.11", "3.12", "3.13"]


def test_the_readme_of_an_index_has_no_relative_link():
    readme = (ROOT / "README.md").read_text()
    text = release.absolute_links(readme, REPOSITORY, "1.2.3")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) == len(re.findall(r"\]\(([^)\s]+)\)", readme)) > 10
    assert all(target.startswith(("https://", "#")) for target in targets)
    for kind, path in re.findall(rf"{REPOSITORY}/(raw|blob)/v1.2.3/([^)#\s]+)", text):
        assert (ROOT / path).exists()
        assert (kind == "raw") == path.endswith((".svg", ".png"))


def test_links_that_are_absolute_stay_and_pictures_in_links_are_found():
    text = "[a](https://a.org) [b](#b) [![c](docs/c.png)](docs/c.md#d) `x[0](1)`"
    found = release.absolute_links(text, REPOSITORY, "1")
    expected = f"[a](https://a.org) [b](#b) [![c]({REPOSITORY}/raw/v1/docs/c.png)]({REPOSITORY}/blob/v1/docs/c.md#d)"
    assert found.startswith(expected)
