import sys

import pytest

from netkin.errors import SourceError
from netkin.sources.names import call, find_function


def test_a_function_of_the_current_directory_is_found_and_called(workshop):
    workshop.write("nk_local", "def make():\n    return 42\n")
    assert call(find_function("nk_local:make"), "nk_local:make") == 42


def test_a_function_may_import_from_the_current_directory_while_it_runs(workshop):
    workshop.write("nk_helper", "value = 7\n")
    workshop.write("nk_late", "def make():\n    from nk_helper import value\n    return value\n")
    assert call(find_function("nk_late:make"), "nk_late:make") == 7


def test_the_import_path_is_as_before_afterwards(workshop):
    workshop.write("nk_path", "def make():\n    raise ValueError\n")
    before = list(sys.path)
    with pytest.raises(SourceError):
        call(find_function("nk_path:make"), "nk_path:make")
    assert sys.path == before


def test_a_module_that_is_not_there_is_refused_with_advice(workshop):
    with pytest.raises(
        SourceError, match="found no module 'nk_absent.deep' for 'nk_absent.deep:make'; run netkin in the"
    ):
        find_function("nk_absent.deep:make")


def test_a_mistyped_name_of_ours_is_recognised(workshop):
    with pytest.raises(SourceError, match=r"found no module 'cifar' for 'cifar:data'; did you mean 'cifar10'\?"):
        find_function("cifar:data", known=["digits", "cifar10"])


def test_what_can_be_no_module_is_refused_the_same_way(workshop):
    with pytest.raises(SourceError, match="found no module 'C' for"):
        find_function("C:/models/net.pt")
    with pytest.raises(SourceError, match="found no module '../net' for"):
        find_function("../net:make")


def test_a_missing_function_is_refused_with_the_nearest_name(workshop):
    workshop.write("nk_names", "def make_net():\n    return 1\n")
    with pytest.raises(SourceError, match=r"module 'nk_names' has no function 'make_nett'; did you mean 'make_net'\?"):
        find_function("nk_names:make_nett")
    with pytest.raises(SourceError, match=r"module 'nk_names' has no function 'zzz'\.$"):
        find_function("nk_names:zzz")


def test_what_is_no_function_is_refused(workshop):
    workshop.write("nk_value", "make = 3\n")
    with pytest.raises(SourceError, match="'nk_value:make' must be a function without arguments; it is of type int"):
        find_function("nk_value:make")


def test_an_error_while_importing_is_told_in_one_line(workshop):
    workshop.write("nk_broken", "raise RuntimeError('no licence\\nsecond line')\n")
    with pytest.raises(
        SourceError, match=r"'nk_broken' of 'nk_broken:f' could not be imported: RuntimeError: no licence\.$"
    ):
        find_function("nk_broken:f")


def test_a_module_that_lacks_another_module_is_not_called_absent_itself(workshop):
    workshop.write("nk_needy", "import nk_not_installed\n")
    with pytest.raises(
        SourceError, match="could not be imported: ModuleNotFoundError: No module named 'nk_not_installed'"
    ):
        find_function("nk_needy:f")


def test_an_error_inside_the_function_is_told_in_one_line(workshop):
    workshop.write("nk_raises", "def make(size):\n    return size\ndef leave():\n    raise SystemExit\n")
    with pytest.raises(SourceError, match="'nk_raises:make' was called without arguments and raised TypeError: make"):
        call(find_function("nk_raises:make"), "nk_raises:make")
    with pytest.raises(SourceError, match=r"raised SystemExit\.$"):
        call(find_function("nk_raises:leave"), "nk_raises:leave")
