"""A harvest finds the pairs of a checkout and nothing else, says why, and runs none of its code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from planted_checkouts import APACHE, GPL, MIT, NAMES, manifest, plant, prepend

from kernel_agent.errors import InputError
from kernel_agent.pairs.meta import read_meta
from kernel_agent.pairs.sections import split_sections
from rag.describe import describe
from rag.harvest import Found, HarvestReport, Kind, Reason, harvest
from rag.licences import Strictness, licence_of, read_licence


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HarvestReport]:
    """One harvest of every checkout."""
    folder = tmp_path_factory.mktemp("checkouts")
    return {name: harvest(plant(name, folder)) for name in NAMES}


def by_name(report: HarvestReport, name: str) -> Found:
    """The pair of this name."""
    (found,) = [one for one in report.found if one.name == name]
    return found


def test_at_least_nine_in_ten_complete_pairs_are_found_over_all_checkouts(reports: dict[str, HarvestReport]) -> None:
    complete = {(name, pair) for name in NAMES for pair in manifest(name).complete}
    found = {(name, f"{one.file}:{one.name}") for name, report in reports.items() for one in report.found}
    assert len(complete) >= 30  # a bar over a handful of pairs says nothing
    assert len(found & complete) >= 0.9 * len(complete), f"missed: {sorted(complete - found)}"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found_is_a_pair(reports: dict[str, HarvestReport], name: str) -> None:
    found = {f"{one.file}:{one.name}" for one in reports[name].found}
    assert found <= manifest(name).complete  # no false pair


@pytest.mark.parametrize("name", NAMES)
def test_every_other_candidate_is_left_for_the_right_reason(reports: dict[str, HarvestReport], name: str) -> None:
    left = {f"{one.file}:{one.name}": one.reason.value for one in reports[name].skipped}
    assert left == manifest(name).skipped


@pytest.mark.parametrize("name", NAMES)
def test_a_found_pair_is_a_pair_file_that_binds_every_name_it_uses(
    reports: dict[str, HarvestReport], name: str
) -> None:
    for found in reports[name].found:
        sections = split_sections(found.text)  # a file with the three markers
        bound = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(ast.parse(sections.head))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert not [node for node in ast.walk(ast.parse(found.text)) if isinstance(node, ast.ImportFrom) and node.level]
        own = {n.name for n in ast.walk(ast.parse(found.text)) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        stored = {
            n.id for n in ast.walk(ast.parse(found.text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        arguments = {n.arg for n in ast.walk(ast.parse(found.text)) if isinstance(n, ast.arg)}
        used = {n.id for n in ast.walk(ast.parse(found.text)) if isinstance(n, ast.Name)}
        unbound = used - bound - own - stored - arguments - set(dir(__builtins__)) - set(__builtins__)
        assert not unbound, f"{found.name}: {unbound}"
        assert read_meta(found.text).grads == found.grads


def test_helpers_of_other_files_come_along_and_names_that_clash_are_told_apart(
    reports: dict[str, HarvestReport],
) -> None:
    found = by_name(reports["relative_imports"], "Shift")
    sections = split_sections(found.text)
    assert "TILE = 1024" in sections.forward  # by a star import
    assert found.files == (
        "rowlib/functions/shift.py",
        "rowlib/kernels/shift.py",
        "rowlib/kernels/sizes.py",
        "rowlib/kernels/unshift.py",
    )
    kernels = [
        n.name for n in ast.parse(sections.forward + sections.backward).body if "kernel" in getattr(n, "name", "")
    ]
    assert len(kernels) == len(set(kernels)) == 2  # both files call theirs `_kernel`


def test_the_backward_section_has_the_backward_and_its_kernels_alone(reports: dict[str, HarvestReport]) -> None:
    sections = split_sections(by_name(reports["wrapped_kernels"], "Clip").text)
    # Kernels that are members of the class are told apart by who uses them: a search looks at the forward section.
    assert "_clip_adjoint" not in sections.forward
    assert "def _clip(" in sections.forward
    assert "ClipBackward._clip_adjoint[grid]" in sections.backward


def test_a_backward_that_a_base_class_has_is_the_subclass_s(reports: dict[str, HarvestReport]) -> None:
    sections = split_sections(by_name(reports["function_styles"], "Twice").text)
    assert "def backward" not in sections.forward
    assert "class TwiceBackward(Twice):" in sections.backward


def test_a_guarded_definition_keeps_both_of_its_branches(reports: dict[str, HarvestReport]) -> None:
    text = by_name(reports["function_styles"], "Twice").text
    assert text.count("def twice(") == 2
    assert "BLOCK = 512" in text  # what could be imported, not what stands where it could not


def test_a_kernel_that_is_bound_anew_keeps_its_order(reports: dict[str, HarvestReport]) -> None:
    text = by_name(reports["library_styles"], "FastRMSNormFunction").text
    places = [text.index(part) for part in ("def _rms_kernel(", "= triton.jit(_rms_kernel)", "= triton.heuristics(")]
    assert places == sorted(places)  # the other way round the file could not be imported


def test_of_imports_for_several_versions_the_first_is_taken(reports: dict[str, HarvestReport]) -> None:
    head = split_sections(by_name(reports["library_styles"], "FastRMSNormFunction").text).head
    assert head.count("import rsqrt") == 1
    assert "from triton.language.extra.libdevice import rsqrt" in head


def test_an_operator_s_backward_is_found_in_another_file(reports: dict[str, HarvestReport]) -> None:
    found = by_name(reports["operators"], "exp_minus")
    assert found.kind is Kind.OPERATOR
    assert "ops/gradients.py" in found.files
    assert "custom_op" not in found.text  # importing the entry registers nothing


def test_the_description_of_a_harvested_forward_names_its_kernels(reports: dict[str, HarvestReport]) -> None:
    words = describe(by_name(reports["couples"], "swish_fwd").text).names
    assert "swish" in words  # else a search would not find what was harvested


def test_a_candidate_whose_file_goes_missing_says_which_name_is_lost(reports: dict[str, HarvestReport]) -> None:
    (left,) = [one for one in reports["relative_imports"].skipped if one.name == "Outer"]
    assert "outer_kernel" in left.detail


def test_a_copy_says_where_the_first_one_is(reports: dict[str, HarvestReport]) -> None:
    (left,) = [one for one in reports["traps"].skipped if one.reason is Reason.DUPLICATE]
    assert left.detail == "trap/original.py:6"


def test_nothing_of_a_checkout_is_run(tmp_path: Path) -> None:
    root = plant("traps", tmp_path)
    trace = tmp_path / "was_run"
    for path in root.rglob("*.py"):
        prepend(path, f"open({str(trace)!r}, 'w').close()")
    (root / "setup.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    assert harvest(root).found
    assert not trace.exists()


def test_a_link_out_of_the_checkout_is_not_followed(tmp_path: Path) -> None:
    outside = plant("couples", tmp_path)
    root = tmp_path / "root"
    root.mkdir()
    (root / "linked").symlink_to(outside)
    (root / "file.py").symlink_to(outside / "functional" / "swish.py")
    assert harvest(root).files == 0


def test_an_expression_without_end_costs_its_own_pair_alone(tmp_path: Path) -> None:
    root = plant("licences", tmp_path)
    path = root / "lib" / "plain.py"
    sum_of_many = " + ".join(["x"] * 900)
    path.write_text(path.read_text().replace("torch.empty_like(x)", sum_of_many))
    report = harvest(root)
    assert [(left.name, left.reason) for left in report.skipped] == [("Plain", Reason.TOO_LARGE)]
    assert len(report.found) == 5


def test_a_file_that_is_no_text_costs_itself_alone(tmp_path: Path) -> None:
    root = plant("licences", tmp_path)
    (root / "lib" / "latin.py").write_bytes("# Kernfunktion für ctx\n".encode("latin-1"))
    report = harvest(root)
    assert [(left.file, left.reason) for left in report.skipped] == [("lib/latin.py", Reason.NOT_PYTHON)]
    assert len(report.found) == 6


def test_a_folder_that_is_not_there_is_the_user_s_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        harvest(tmp_path / "none")


def test_the_commit_is_read_without_running_git(tmp_path: Path) -> None:
    root = plant("couples", tmp_path)
    (root / ".git" / "refs" / "heads").mkdir(parents=True)
    (root / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (root / ".git" / "refs" / "heads" / "main").write_text("0123abcd\n")
    report = harvest(root)
    assert report.commit == "0123abcd"
    assert 'commit="0123abcd"' in report.found[0].text


# Licences.


@pytest.fixture
def licensed(tmp_path: Path) -> dict[str, Found]:
    """A checkout under MIT whose files say other things."""
    root = plant("licences", tmp_path)
    (root / "LICENSE").write_text(MIT)
    prepend(root / "lib" / "headed.py", "# SPDX-License-Identifier: GPL-3.0-only")
    prepend(root / "lib" / "milder.py", "# SPDX-License-Identifier: CC0-1.0")
    prepend(root / "lib" / "copyleft_kernels.py", "# SPDX-License-Identifier: LGPL-2.1-or-later")
    prepend(root / "lib" / "reserved.py", "# Copyright Someone. All rights reserved.")
    (root / "vendor" / "COPYING").write_text(GPL)
    return {found.name: found for found in harvest(root).found}


def test_a_file_without_notice_is_under_its_checkout_s_licence(licensed: dict[str, Found]) -> None:
    assert (licensed["Plain"].licence, licensed["Plain"].licence_from) == ("MIT", "LICENSE")


def test_of_file_and_checkout_the_stricter_licence_counts(licensed: dict[str, Found]) -> None:
    assert licensed["Headed"].licence == "GPL-3.0-only"
    assert licensed["Milder"].licence == "MIT"  # the file's is the milder one


def test_a_helper_s_licence_counts_for_what_uses_it(licensed: dict[str, Found]) -> None:
    assert licensed["Helped"].licence == "LGPL-2.1-or-later"
    assert licensed["Helped"].licence_from == "lib/copyleft_kernels.py"


def test_all_rights_reserved_is_stricter_than_any_licence(licensed: dict[str, Found]) -> None:
    assert licensed["Reserved"].licence == "LicenseRef-All-Rights-Reserved"


def test_a_folder_s_own_licence_counts_for_what_is_below_it(licensed: dict[str, Found]) -> None:
    assert (licensed["Vendored"].licence, licensed["Vendored"].licence_from) == ("GPL", "vendor/COPYING")


def test_without_any_licence_the_entry_says_so(reports: dict[str, HarvestReport]) -> None:
    assert {found.licence for found in reports["licences"].found} == {""}
    assert read_meta(by_name(reports["licences"], "Plain").text).license == ""


def test_the_licence_stands_in_the_entry(licensed: dict[str, Found]) -> None:
    assert read_meta(licensed["Headed"].text).license == "GPL-3.0-only"


@pytest.mark.parametrize(
    ("notice", "name", "strictness"),
    [
        (APACHE, "Apache-2.0", Strictness.PERMISSIVE),
        (MIT, "MIT", Strictness.PERMISSIVE),
        (GPL, "GPL", Strictness.COPYLEFT),
        ('# Licensed under the Apache License, Version 2.0 (the "License");', "Apache-2.0", Strictness.PERMISSIVE),
        ("// This code is for non-commercial use only.", "LicenseRef-Non-Commercial", Strictness.RESTRICTED),
        ("GNU AFFERO GENERAL PUBLIC LICENSE", "AGPL-3.0", Strictness.COPYLEFT),
        (
            "# Redistribution and use in source and binary\n# forms, with or without",
            "BSD-2-Clause",
            Strictness.PERMISSIVE,
        ),
        (
            "# This source code is licensed under the BSD-style license found in the",
            "BSD-3-Clause",
            Strictness.PERMISSIVE,
        ),
        ("This software is proprietary and confidential.", "LicenseRef-All-Rights-Reserved", Strictness.RESERVED),
    ],
)
def test_the_words_of_a_licence_are_known(notice: str, name: str, strictness: Strictness) -> None:
    read = read_licence(notice, "LICENSE")
    assert read is not None
    assert (read.name, read.strictness) == (name, strictness)


@pytest.mark.parametrize(
    ("expression", "strictness"),
    [
        ("MIT OR GPL-2.0-only", Strictness.PERMISSIVE),
        ("MIT AND GPL-2.0-only", Strictness.COPYLEFT),
        ("Apache-2.0 WITH LLVM-exception", Strictness.PERMISSIVE),
        ("(MIT OR Apache-2.0) AND CC-BY-NC-4.0", Strictness.RESTRICTED),
        ("LicenseRef-Something", Strictness.NONE),
        ("Some licence of ours", Strictness.NONE),
    ],
)
def test_of_an_expression_or_is_as_mild_and_and_as_strict_as_its_parts(expression: str, strictness: Strictness) -> None:
    assert licence_of(expression, "x.py").strictness is strictness


def test_a_file_that_speaks_of_a_licence_in_its_code_is_not_under_it(tmp_path: Path) -> None:
    root = plant("licences", tmp_path)
    path = root / "lib" / "plain.py"
    path.write_text(path.read_text() + '\n\nTEXT = "GNU General Public License"\n')
    assert {found.licence for found in harvest(root).found if found.name == "Plain"} == {""}
