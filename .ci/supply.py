"""What the project is made of: `supply.py lock` writes the hashed set, `supply.py sbom` names it.

The lock holds names, versions and digests, no address: it fits whichever index is asked. Both are
made from pip's own resolution of pyproject.toml for the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
LOCK = ROOT / ".ci" / f"locked-{VERSION}.txt"
EXTRAS = "solve,torch,gnn,web,ray,dev"  # as the Makefile installs
OWN = {"foretell", "foretell-lab"}


def plain(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolved(*wanted: str) -> list[dict[str, Any]]:
    """What pip would install, with digests and metadata."""
    line = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    line += ["--report", "-", "--constraint", str(ROOT / "constraints.txt"), *wanted]
    said = subprocess.run(line, check=True, stdout=subprocess.PIPE, cwd=ROOT, text=True).stdout
    found: list[dict[str, Any]] = json.loads(said)["install"]
    kept = [one for one in found if plain(one["metadata"]["name"]) not in OWN]
    return sorted(kept, key=lambda one: plain(one["metadata"]["name"]))


def lock() -> str:
    """The lines of the lock: builder and all that tests need."""
    builders = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    lines = [f"# Made by `.ci/supply.py lock` with Python {VERSION}; do not edit."]
    for one in resolved(f".[{EXTRAS}]", *builders, "editables"):
        meta, digest = one["metadata"], one["download_info"]["archive_info"]["hashes"]["sha256"]
        version = meta["version"].partition("+")[0]  # a build for one device is the same version
        lines.append(f"{plain(meta['name'])}=={version} --hash=sha256:{digest}")
    return "\n".join(lines) + "\n"


def sbom(extras: str) -> dict[str, Any]:
    """CycloneDX 1.6: the package, what it needs, and which of them needs which."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = resolved(f".[{extras}]" if extras else ".")
    names = {plain(one["metadata"]["name"]) for one in found}
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    parts = [component(one) for one in found]
    refs = {part["name"]: part["bom-ref"] for part in parts}
    needs = {plain(one["metadata"]["name"]): one["metadata"] for one in found}
    edges = [{"ref": refs[name], "dependsOn": sorted(refs[n] for n in _needed(meta) & names)}
             for name, meta in needs.items()]  # fmt: skip
    first = {plain(re.split(r"[ \[<>=!~;]", line)[0]) for line in project["dependencies"]}
    for extra in filter(None, extras.split(",")):
        lines = project["optional-dependencies"][extra]
        first |= {plain(re.split(r"[ \[<>=!~;]", line)[0]) for line in lines}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(parts)).urn,
        "version": 1,
        "metadata": {
            "component": {"type": "library", "bom-ref": own, "name": project["name"],
                          "version": project["version"], "purl": own,
                          "licenses": [{"license": {"id": project["license"]}}]}
        },
        "components": parts,
        "dependencies": [
            {"ref": own, "dependsOn": sorted(refs[n] for n in first & names)}, *edges
        ],
    }  # fmt: skip


def component(one: dict[str, Any]) -> dict[str, Any]:
    """One package as CycloneDX writes it."""
    meta = one["metadata"]
    name = plain(meta["name"])
    purl = f"pkg:pypi/{name}@{meta['version'].replace('+', '%2B')}"
    digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
    made = {"type": "library", "bom-ref": purl, "name": name, "version": meta["version"],
            "purl": purl, "hashes": [{"alg": "SHA-256", "content": digest}]}  # fmt: skip
    if license_ := _license(meta):
        made["licenses"] = [license_]
    return made


def _license(meta: dict[str, Any]) -> dict[str, Any]:
    if said := meta.get("license_expression"):
        return {"expression": said}
    for line in meta.get("classifier", []):
        if line.startswith("License :: OSI Approved :: "):
            return {"license": {"name": line.rpartition(" :: ")[2]}}
    short = (meta.get("license") or "").strip()
    return {"license": {"name": short}} if 0 < len(short) < 80 else {}


def _needed(meta: dict[str, Any]) -> set[str]:
    """What a package always needs; what its extras bring is no edge."""
    lines = [line for line in meta.get("requires_dist", []) if "extra ==" not in line]
    return {plain(re.split(r"[ \[<>=!~;(]", line)[0]) for line in lines}


def main() -> None:
    """Write the lock, or print the bill of materials."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("what", choices=("lock", "sbom"))
    asked.add_argument("--extras", default="", help="of the package, for the bill of materials")
    given = asked.parse_args()
    if given.what == "lock":
        LOCK.write_text(lock())
        print(LOCK.relative_to(ROOT))
    else:
        print(json.dumps(sbom(given.extras), indent=1))


if __name__ == "__main__":
    main()
