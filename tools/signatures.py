"What the site says of a function or a class: its call in a line of code, its docstring, and its parameters as a table"
import inspect,math,re
from dataclasses import MISSING,fields,is_dataclass
from enum import Enum
from functools import partial
from html import escape
from textwrap import dedent,fill
from types import NoneType,UnionType
from typing import Union,get_args,get_origin
from fastcore.docments import docments

empty = inspect.Parameter.empty
fence = '```{ .python .signature }'
width = 44 # characters of a line of code that a phone shows

# %% types and defaults, as you write them
def types(t) -> list:
    "The annotation `t` as the types it joins: `['str', 'None']`, `['nn.Module']`; none without an annotation"
    if t is empty: return []
    if get_origin(t) in (Union,UnionType): return [n for o in get_args(t) for n in types(o)]
    if isinstance(t, str): return [o.strip() for o in t.split('|')]
    if t in (None,NoneType): return ['None']
    name,module = getattr(t, '__name__', None) or re.sub(r'\b\w+\.', '', str(t)),getattr(t, '__module__', '')
    prefixes = {'torch': 'torch.', 'torch.amp.autocast_mode': 'torch.', 'torch.nn.modules.module': 'nn.'}
    return [prefixes.get(module, '')+name if name!='Tensor' else name]

def default(v) -> str:
    "The value `v` as you would write it"
    if isinstance(v, Enum): return f'{type(v).__name__}.{v.name}' if ' ' in v.value else repr(v.value) # a text for readers, or for code
    if isinstance(v, type) or inspect.isroutine(v): return v.__name__
    if isinstance(v, tuple): return '('+', '.join(map(default, v))+',)'*(len(v)==1)+')'*(len(v)!=1)
    if isinstance(v, float) and math.isinf(v): return 'math.inf' if v>0 else '-math.inf'
    if isinstance(v, float) and len(repr(v))>8 and math.frexp(v)[0]==.5: return f'2.**{math.frexp(v)[1]-1}'
    return repr(v)

def _made(o):
    "What the fields of the dataclass `o` begin with where each object gets its own"
    made = {f.name: f.default_factory for f in (fields(o) if is_dataclass(o) else ())}
    return {k: default(f()) if f in (list,dict,set,tuple) else '…' for k,f in made.items() if f is not MISSING}

def _returned(o):
    "The comment on what the function `o` returns, where it has no annotation, beside which `docments` finds it"
    text = dedent(inspect.getsource(o)) if inspect.isfunction(o) else ''
    return (re.match(r'(?:@.*\n)*def .*\n(?: .*\n)*\): *# *(.*)', text) or ['',''])[1]

def _fields(o):
    "The fields of the `NamedTuple` `o`, as `parameters` returns them, with the comments in its code"
    said = dict(re.findall(r'^ +(\w+) *:.*?# *(.*)', inspect.getsource(o), re.M))
    kind,values = inspect.Parameter.POSITIONAL_OR_KEYWORD,o._field_defaults
    return {k: dict(kind=kind, types=types(o.__annotations__[k]), default=default(values[k]) if k in values else None,
                    meaning=said.get(k, '')) for k in o._fields}

def parameters(o) -> dict:
    "What `o` takes, by name: `kind`, `types`, `default` (`None` if it must be given) and `meaning`; also what it returns, as `return`"
    if isinstance(o, type) and issubclass(o, tuple) and hasattr(o, '_fields'): return _fields(o)
    made,res = _made(o),{}
    for k,p in docments(o, full=True, returns=True).items():
        has_none = p.default is None if 'default' in p else False
        found = [] if has_none and p.anno is NoneType else types(p.anno)
        value = None if p.get('default', empty) is empty else made.get(k) or default(p.default)
        res[k] = dict(kind=p.get('kind'), types=found, default=value, meaning=' '.join((p.docment or '').split()))
    if 'return' in res: res['return']['meaning'] = res['return']['meaning'] or _returned(o)
    is_opaque = {*res}-{'self','return'}<={'args','kwargs','kwds'} # as in a class without `__init__`
    is_bound = isinstance(o, type) or '.' in o.__qualname__
    left_out = {*(['self','cls'] if is_bound else []),
                *(['return'] if isinstance(o, type) else []), *(['args','kwargs','kwds'] if is_opaque else [])}
    return {k: p for k,p in res.items() if k not in left_out}

# %% Markdown
def _wrapped(head, args, end, width=width):
    "`head`, `args` and `end` in one line, or in as many as it takes"
    text = ', '.join(args)
    if len(head+text+end)<=width: return head+text+end
    lines = fill(text, width, initial_indent=' '*4, subsequent_indent=' '*4, break_long_words=False, break_on_hyphens=False)
    return f'{head}\n{lines}\n{end}'

def call(name, params, width=width) -> str:
    "A call of `name`, with defaults, in as many lines as it takes"
    args,ret,starred = [],params.get('return'),False
    for k,p in params.items():
        if k=='return': continue
        stars = {inspect.Parameter.VAR_POSITIONAL: '*', inspect.Parameter.VAR_KEYWORD: '**'}.get(p['kind'], '')
        if p['kind']==inspect.Parameter.KEYWORD_ONLY and not starred: args.append('*')
        starred = starred or stars=='*' or p['kind']==inspect.Parameter.KEYWORD_ONLY
        args.append(stars+k+('' if p['default'] is None else f"={p['default']}"))
    end = ')'+(f" -> {' | '.join(ret['types'])}" if ret and ret['types'] else '')
    return _wrapped(f'{name}(', args, end, width)

def table(rows, head) -> str:
    "A table in Markdown, without the columns that are empty"
    used = [i for i in range(len(head)) if any(r[i] for r in rows)]
    lines = [[r[i] for i in used] for r in [head, ['---']*len(head), *rows]]
    return '\n'.join('| '+' | '.join(o)+' |' for o in lines) if rows else ''

def _cell(text):
    "`text` within a table: a bar outside of code would begin another cell; quoted words are code"
    def plain(s): return re.sub(r"(?<!\w)('\w+')(?!\w)", r'`\1`', s.replace('|', r'\|'))
    return ''.join(o if i%2 else plain(o) for i,o in enumerate(re.split('(`[^`]*`)', text)))

def _kinds(ts): return r' \| '.join(f'`{o}`' for o in ts)
def _code(text): return f'<code>{escape(text, quote=False)}</code>' # not linked to what has the same name

def parameter_table(params) -> str:
    "Name, type, default and meaning of each parameter; and of what is returned, if there is something to say of it"
    if not any(p['meaning'] for p in params.values()): return ''
    rows = [[_code(k), _kinds(p['types']), _code(p['default']) if p['default'] is not None else '', _cell(p['meaning'])]
            for k,p in params.items() if k!='return']
    ret = params.get('return')
    if ret and ret['meaning']: rows.append(['*returns*', _kinds(ret['types']), '', _cell(ret['meaning'])])
    return table(rows, ['Parameter', 'Type', 'Default', 'Meaning'])

def method_tables(name, o, elsewhere) -> list:
    "The public properties and methods of a class, with a sentence on each; not events, and none with a signature `elsewhere`"
    rows = {'Property': [], 'Method': []}
    for k,v in vars(o).items():
        f = getattr(v, 'fget', None) or getattr(v, '__func__', None) or getattr(v, 'func', v)
        if not inspect.isfunction(f) or re.match(r'_|(before|after)_', k) or f'{name}.{k}' in elsewhere: continue
        is_value = f is not v and not hasattr(v, '__func__') # a property, of which the table tells all
        doc = f.__doc__ or ''
        first,*more = [' '.join(o.split()) for o in doc.split('\n\n')]
        said = '. '.join([first, *more]) if is_value else first
        rows['Property' if is_value else 'Method'].append([_code(k if is_value else call(k, parameters(f), math.inf)), _cell(said)])
    return [table(found, [kind, 'Meaning']) for kind,found in rows.items()]

def signature(name, o, elsewhere=()) -> str:
    "Heading, call, docstring and parameters of `o`, in Markdown; a class without its methods that are `elsewhere`"
    if isinstance(o, partial):
        args = [o.func.__name__, *(f'{k}={default(v)}' for k,v in o.keywords.items())]
        parts = [f"{fence}\n{_wrapped(f'{name} = partial(', args, ')')}\n```", o.__doc__]
    elif isinstance(o, dict): parts = ['By name: '+', '.join(f'`{k}`' for k in o)]
    elif isinstance(o, tuple): parts = [', '.join(f"`{default(t)}`" for t in o)]
    elif isinstance(o, (str,float)): parts = [f'`{o!r}`']
    elif isinstance(o, property): parts = [o.__doc__]
    elif isinstance(o, type) and issubclass(o, Enum):
        parts = [f'{fence}\nclass {name}(Enum)\n```', o.__doc__, table([[_code(m.name), _cell(m.value)] for m in o], ['Member', 'Meaning'])]
    else:
        params,doc = parameters(o),inspect.cleandoc(o.__doc__).split('\n\nArguments:')[0] # which the table has, too
        ours = [f"{fence}\n{'class '*isinstance(o, type)}{call(name, params)}\n```", doc, parameter_table(params)]
        parts = ours+(method_tables(name, o, elsewhere) if isinstance(o, type) else [])
    label = name.split('.')[-1]
    return '\n\n'.join([f'### `{name}` {{ #{name} data-toc-label="{label}" }}', *filter(None, parts)])
