"""The rendered files of known clusters, to the byte: a change here is a change on everybody's hosts."""

from __future__ import annotations

import pytest

from tests.golden.cases import CASES, FOLDER, rendered


@pytest.mark.parametrize("case", CASES)
def test_rendered_files_are_as_kept(case: str) -> None:
    kept = {
        str(path.relative_to(FOLDER / case)): path.read_text()
        for path in sorted((FOLDER / case).rglob("*"))
        if path.is_file()
    }
    assert rendered(CASES[case]()) == kept
