"""Import-only stand-in for triton (1 GB): kernels can be defined, none can run. SGLang imports it on every platform.

Every submodule exists, and every attribute of one: a class where the name is capitalised or is a known type, otherwise a
module that can also be called, as a decorator.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.0.0"

_TYPES = frozenset({"constexpr", "dtype", "tensor", "pointer_type", "block_type"})


class Kernel:
    """A kernel that was defined. Using it is an error that names it."""

    def __init__(self, function):
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def _refuse(self, *args, **kwargs):
        raise RuntimeError(f"triton kernel {self.__name__} was used, but this is the import-only stand-in for CPU tests")

    __call__ = __getitem__ = _refuse


class Config:
    """Tuning settings, kept and never used."""

    def __init__(self, kwargs=None, **settings):
        self.kwargs = dict(kwargs or {})
        self.num_warps = settings.get("num_warps", 4)
        self.num_stages = settings.get("num_stages", 2)


def jit(function=None, **options):
    return Kernel if function is None else Kernel(function)


def autotune(*args, **kwargs):
    return lambda kernel: kernel


def heuristics(*args, **kwargs):
    return lambda kernel: kernel


def cdiv(dividend, divisor):
    return (dividend + divisor - 1) // divisor


def next_power_of_2(number):
    return 1 if number <= 1 else 1 << (number - 1).bit_length()


def _stand_in(module, name):
    """What `module.name` is, for a name that nobody has set."""
    if name.startswith("__"):
        raise AttributeError(f"{module} has no {name}")
    if name == "jit":
        return jit
    if name in _TYPES or name[0].isupper():
        bases = (Exception,) if name.endswith(("Error", "Resources")) else ()
        return type(name, bases, {"__module__": module, "__init__": lambda self, *args, **kwargs: None})
    return importlib.import_module(f"{module}.{name}")


class _Submodule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        value = _stand_in(self.__name__, name)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        is_bare_decorator = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_bare_decorator else lambda function: function


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Submodules())
backends = importlib.import_module("triton.backends")
backends.backends = {}  # torch asks here whether triton can compile anything
language = importlib.import_module("triton.language")
runtime = importlib.import_module("triton.runtime")


def __getattr__(name):
    value = _stand_in("triton", name)
    globals()[name] = value
    return value
