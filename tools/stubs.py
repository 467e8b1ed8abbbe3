"Make `fastai_amp16/all.pyi`, from which type checkers and editors know the public names, out of what these are at run time"
import builtins,inspect,re
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from textwrap import fill,indent
from types import GenericAlias
import torch
from fastai.callback.fp16 import AMPMode
from torch import nn
from fastai_amp16 import all as public
from signatures import default,parameters

fn = Path(public.__file__).with_suffix('.pyi')
imports = '''# tools/stubs.py makes this file from the signatures
from collections.abc import Callable,Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any,TypeVar
import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import AMPMode,MixedPrecision
from fastai.learner import Metric
from fastai.optimizer import Lookahead,Optimizer
from pandas import DataFrame
from torch import Tensor,nn
from torch.amp import GradScaler

Real = float # for checkers, a float is no `numbers.Real`
Class = TypeVar('Class', bound=type)'''

names = {k: getattr(public, k) for k in public.__all__}
# Attributes are those of an object; what its class takes for it, if it must be given
given = {public.DynamicScaler: ['cpu'], public.PrecisionPlan: [nn.Linear(1, 1)], public.FusedAdam: [[torch.zeros(1)], 1.]}

# %% functions
def _type(p):
    "The type of a parameter, or of what is returned; with `None` if that is the default, or if the comment mentions it"
    if not p['types']: return 'Any'
    has_none = p['default']=='None' or '`None`' in p['meaning']
    return ' | '.join(dict.fromkeys([*p['types'], *['None']*has_none]))

def _parameter(k, p):
    value = '...' if p['default'] in ('…','[]') else p['default'] # made anew for each object
    return f'{k}: {_type(p)}'+('' if value is None else f' = {value}')

def _function(name, params, returns, args=()):
    "The line that declares a function, with a line for each parameter if it is long"
    args = [*args]
    for k,p in params.items():
        if k=='return': continue
        if p['kind']==inspect.Parameter.KEYWORD_ONLY and '*' not in args: args.append('*')
        args.append(_parameter(k, p))
    line = f"def {name}({', '.join(args)}) -> {returns}: ..."
    return line if len(line)<=120 else '\n'.join([f'def {name}(', *(f'    {o},' for o in args), f') -> {returns}: ...'])

def _returns(f, params):
    if inspect.isgeneratorfunction(inspect.unwrap(f)): return 'AbstractContextManager' # by `contextmanager`
    return _type(params['return']) if 'return' in params else 'Any'

def _of_function(name, f):
    params = parameters(f)
    res = _function(name, params, _returns(f, params))
    is_decorator = [p['types'] for p in params.values()]==[['type'],['type']] # it returns the class that it takes
    return re.sub(r'\btype\b', 'Class', res) if is_decorator else res

def _of_partial(name, o):
    params,by_name = parameters(o.func),False
    for k,p in params.items():
        by_name = by_name or k in o.keywords # what a partial has by name, and all after it, is given by name only
        if by_name: p['kind'] = inspect.Parameter.KEYWORD_ONLY
        if k in o.keywords: p['default'] = default(o.keywords[k])
    return _function(name, params, o.func.__name__ if isinstance(o.func, type) else _returns(o.func, params))

# %% classes
def _bases(cls): return vars(cls).get('__orig_bases__', cls.__bases__)
def _name(t): return re.sub(r'\w+\.', '', str(t)) if isinstance(t, GenericAlias) else t.__name__

def _known(t):
    "The name of the class `t`, or of the one that it is made from, if the stub knows it; else `None`"
    if t is object: return None
    is_known = isinstance(t, GenericAlias) or t in (*names.values(),AMPMode) or t.__module__==builtins.__name__
    return _name(t) if is_known else _known(_bases(t)[0])

def _attributes(o, parts, params):
    "The attributes of the object `o`, and of `parts`, which make up its class"
    values = {k: v for part in parts for k,v in vars(part).items() if not (callable(v) or hasattr(v, '__get__'))}
    for k,v in {**values, **vars(o)}.items():
        name = None if v is None else _known(type(v))
        if not k.startswith('_'): yield f"{k}: {name or (_type(params[k]) if k in params else 'Any')}"

def _methods(parts):
    "Properties and methods, but no events"
    for k,f in ((k, f) for part in parts for k,f in vars(part).items() if not re.match('_|(before|after)_', k)):
        if isinstance(f, property):
            yield '@property'
            f = f.fget
        if inspect.isfunction(f): yield _function(k, parameters(f), _returns(f, parameters(f)), ['self'])

def _of_class(name, cls):
    parts = [o for o in cls.__mro__ if o.__module__.startswith(public.__package__)][::-1] # some may not be public
    params,base = parameters(cls),_name(_bases(parts[0])[0])
    lines = [f'class {name}'+f'({base})'*(base!='object')+':']
    def add(found): lines.extend(indent(o, '    ') for o in found)
    if is_dataclass(cls):
        lines = ['@dataclass', *lines]
        add(_parameter(k, p) for k,p in params.items())
    else:
        add(_attributes(cls(*given.get(cls, ())), parts, params))
        if '__init__' in vars(cls): add([_function('__init__', params, 'None', ['self'])])
    add(_methods(parts))
    return '\n'.join(lines) if len(lines)>1 else f'{lines[0]} ...'

_holds = { # of what is in generic types, nothing is known
    'dict': 'Any, Any', 'tuple': 'Any, ...', 'Callable': '..., Any',
    **dict.fromkeys(['list','set','Iterable','AbstractContextManager'], 'Any')}

def stub():
    "The text of the file"
    def one(name, o):
        f = _of_class if isinstance(o, type) else _of_partial if isinstance(o, partial) else _of_function
        return re.sub(rf"\b({'|'.join(_holds)})\b(?![\[(])", lambda m: f'{m[1]}[{_holds[m[1]]}]', f(name, o))
    listed = fill(f'__all__ = {[*names]}', 120, subsequent_indent=' '*11)
    return '\n\n'.join([imports, listed, *(one(k, o) for k,o in names.items())])+'\n'

if __name__=='__main__': fn.write_text(stub())
