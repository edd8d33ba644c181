"""Patches: the calls that a wrapper receives, composed wrappers, and restored originals after a block."""

import sys
import types

import pytest

from moeverify.faults.patch import Patch, find_users

HOME = """
def double(x, *, more=0):
    return 2 * x + more

def call_home(x):
    return double(x)

class Layer:
    def forward(self, x):
        return x + 1

    __call__ = forward
"""
CALLER = """
from patch_home import double as twice

def call(x):
    return twice(x)
"""


def make_module(name, text, monkeypatch):
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(text, vars(module))
    return module


@pytest.fixture
def home(monkeypatch):
    return make_module("patch_home", HOME, monkeypatch)


@pytest.fixture
def caller(home, monkeypatch):
    return make_module("patch_caller", CALLER, monkeypatch)


def add(number):
    return lambda original, x, *, more=0: original(x, more=more) + number


def test_a_wrapper_gets_the_calls_of_all_modules_under_any_name(home, caller):
    double = home.double
    with Patch() as patch:
        patch.wrap(double)(add(100))
        assert (home.call_home(1), caller.call(1), double(1)) == (102, 102, 2)
        assert patch.functions == [double]
        assert home.double.__name__ == "double"
    assert (home.call_home(1), caller.call(1)) == (2, 2)
    assert home.double is double
    assert caller.twice is double


def test_with_used_by_one_module_sees_the_wrapper(home, caller):
    with Patch() as patch:
        patch.wrap(home.double, used_by=caller)(add(100))
        assert (home.call_home(1), caller.call(1)) == (2, 102)
    assert caller.call(1) == 2


def test_what_judges_keeps_the_original(home, monkeypatch):
    judge = make_module("moeverify.verification.compare.judge", CALLER, monkeypatch)
    ours = make_module("moeverify.compared", CALLER, monkeypatch)
    with Patch() as patch:
        patch.wrap(home.double)(add(100))
        assert (judge.call(1), ours.call(1)) == (2, 102)


def test_the_module_of_a_wrapper_keeps_the_original(home, monkeypatch):
    text = CALLER + "\ndef wrapper(original, x, *, more=0):\n    return twice(x, more=more) + 100\n"
    fault = make_module("patch_fault", text, monkeypatch)
    with Patch() as patch:
        patch.wrap(home.double)(fault.wrapper)
        assert home.call_home(1) == 102, "no endless recursion"


def test_a_fault_beside_the_code_that_it_breaks_reaches_it(monkeypatch):
    own = make_module(
        "patch_own", HOME + "\ndef wrapper(original, x, *, more=0):\n    return 7\n", monkeypatch
    )
    with Patch() as patch:
        patch.wrap(own.double)(own.wrapper)
        assert own.call_home(1) == 7


def test_a_method_is_wrapped_in_its_class_under_all_its_names(home):
    layer = home.Layer()
    with Patch() as patch:

        @patch.wrap(home.Layer.forward)
        def negate(original, self, x):
            return -original(self, x)

        assert (layer.forward(1), layer(1)) == (-2, -2)
    assert (layer.forward(1), layer(1)) == (2, 2)


def test_a_replacement_does_without_the_original(home):
    with Patch() as patch:
        patch.replace(home.double)(lambda x, *, more=0: more)
        assert home.double(1, more=5) == 5
    assert home.double(1, more=5) == 7


def test_wrappers_compose_the_last_one_runs_first(home, caller):
    double, order = home.double, []

    def note(word):
        def wrapper(original, x, *, more=0):
            order.append(word)
            return original(x, more=more)

        return wrapper

    with Patch() as patch:
        patch.wrap(double)(note("all"))
        patch.wrap(double, used_by=caller)(note("caller"))
        patch.wrap(home.double)(note("all again"))
        assert (caller.call(1), order) == (2, ["all again", "caller", "all"])
        order.clear()
        assert (home.call_home(1), order) == (2, ["all again", "all"])
    assert home.double is caller.twice is double


def test_patches_nest_and_the_inner_one_is_undone_first(home):
    double = home.double
    with Patch() as outer:
        outer.wrap(double)(add(100))
        with Patch() as inner:
            inner.wrap(double)(add(1000))
            assert home.call_home(1) == 1102
        assert home.call_home(1) == 102
    assert home.double is double


@pytest.mark.parametrize("where", ["after", "between"])
def test_an_error_undoes_what_was_wrapped(home, where):
    double, forward = home.double, home.Layer.forward

    def run():
        with Patch() as patch:
            patch.wrap(double)(add(100))
            if where == "between":
                raise ZeroDivisionError
            patch.replace(forward)(lambda self, x: 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert home.double is double
    assert home.Layer.forward is forward


def test_a_module_that_is_imported_within_the_block_has_the_original_after_it(home, monkeypatch):
    double = home.double
    with Patch() as patch:
        patch.wrap(double)(add(100))
        late = make_module("patch_late", CALLER, monkeypatch)
        assert late.call(1) == 102
    assert late.twice is double


def test_outside_of_its_block_a_patch_wraps_nothing(home):
    double = home.double
    patch = Patch()
    with pytest.raises(RuntimeError, match="within its `with` block"):
        patch.wrap(double)(add(1))
    with patch:
        pass
    with pytest.raises(RuntimeError, match="within its `with` block"):
        patch.wrap(double)(add(1))
    assert home.double is double


def test_what_no_module_knows_cannot_be_wrapped(home, caller):
    with Patch() as patch:
        with pytest.raises(LookupError, match=r"^`patch_caller` .* `patch_home.call_home`; no other module"):
            patch.wrap(home.call_home, used_by=caller)(lambda original, x: 0)
        with pytest.raises(
            LookupError, match=r"^`sys` does not know `patch_home.double`; `patch_caller` does"
        ):
            patch.wrap(home.double, used_by=sys)(add(1))
        forgotten = vars(home).pop("call_home")
        with pytest.raises(LookupError, match=r"^the code under test does not know `patch_home.call_home`"):
            patch.wrap(forgotten)(lambda original, x: 0)


def test_a_class_is_wrapped_by_its_init(home):
    with Patch() as patch, pytest.raises(TypeError, match="`Layer` is a class: wrap its `__init__`"):
        patch.wrap(home.Layer)(lambda original: None)


@pytest.mark.parametrize(
    "wrapper",
    [lambda original: 0, lambda original, x, extra, *, more=0: 0, lambda x: 0, lambda original, *, x: 0],
)
def test_a_wrapper_must_take_the_arguments(home, wrapper):
    double = home.double
    with Patch() as patch:
        with pytest.raises(TypeError, match="does not take the arguments of `double`"):
            patch.wrap(double)(wrapper)
        assert home.double is double
        assert patch.functions == []


def test_a_keyword_without_default_must_be_taken_by_its_name(monkeypatch):
    home = make_module("patch_home", "def f(x, *, tokens):\n    return tokens\n", monkeypatch)
    with Patch() as patch:
        with pytest.raises(TypeError, match="'tokens'"):
            patch.replace(home.f)(lambda x: 0)
        patch.replace(home.f)(lambda x, *, tokens: -tokens)
        assert home.f(0, tokens=1) == -1


def test_the_users_of_a_function_are_where_it_can_be_wrapped(home, caller):
    assert find_users(home.double) == [caller]
    with Patch() as patch:
        patch.wrap(home.double)(add(1))
        assert find_users(patch.functions[0]) == [caller]
