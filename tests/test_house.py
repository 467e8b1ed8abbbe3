"The house: how much syntax the package has, how dense it is, and which module imports which"
import ast
from functools import cached_property
from pathlib import Path
import pytest
from nbdev.config import get_config
from docs import folders # each imports only from those before it, and from itself; the last one holds the others

root = Path(__file__).parent.parent
cfg = get_config(root)
lib = cfg.lib_path

limits = { # the most that is allowed: today, which falls as the package shrinks, and in the end
    'nodes': (47_880, 31_000),
    'nodes in a line': (7.0, 7.0),
    'nodes in a function': (180, 180),
    '`and` and `or` in 100 lines': (7.0, 7.0),
    'lines over 100 columns, in percent': (7.0, 7.0),
    'lines over 120 columns': (3, 0),
    'lines of a module': (400, 400),
    'modules beside folders': (9, 9)}

defines = ast.FunctionDef,ast.AsyncFunctionDef
holds_docstring = (ast.Module,ast.ClassDef,*defines)

def docstring(node):
    "The statement that is the docstring of a module, class or function; `None` if it has none"
    first = node.body[0] if isinstance(node, holds_docstring) and node.body else None
    is_string = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return first if is_string else None

def docstrings(tree): return [o for o in map(docstring, ast.walk(tree)) if o]

def nodes(tree):
    "How many nodes its syntax has without docstrings and imports: folding two lines into one changes nothing"
    left_out = ast.expr_context,ast.Import,ast.ImportFrom,ast.alias
    def is_counted(o): return not isinstance(o, left_out)
    return sum(map(is_counted, ast.walk(tree)))-2*len(docstrings(tree)) # a statement and its constant

class Module:
    "A module of the package"
    def __init__(self, name, src): self.name,self.src = name,src
    @cached_property
    def tree(self): return ast.parse(self.src)
    @property
    def lines(self): return self.src.splitlines()
    @property
    def code(self):
        "Lines that are not blank, comments or docstrings"
        left_out = {i for o in docstrings(self.tree) for i in range(o.lineno, o.end_lineno+1)}
        def is_code(line): return line.strip() and not line.strip().startswith('#')
        return [line for i,line in enumerate(self.lines, 1) if i not in left_out and is_code(line)]
    @property
    def functions(self): return {o.name: nodes(o) for o in ast.walk(self.tree) if isinstance(o, defines)}
    @property
    def folder(self): return self.name.split('.')[0] if '.' in self.name else folders[-1]
    def imports(self, names):
        "Which of the modules `names` it imports as it is imported itself"
        for o in self.tree.body:
            if not isinstance(o, ast.ImportFrom) or not o.level: continue
            above = self.name.split('.')[:-o.level]
            base = [*above, *(o.module or '').split('.')] if o.module else above
            for name in ('.'.join(base), *('.'.join([*base, a.name]) for a in o.names)):
                if name in names and name!=self.name: yield name

@pytest.fixture(scope='module')
def package():
    "All modules of the package by name, without `_modidx` and `__init__`, which hold no code"
    found = {'.'.join(fn.relative_to(lib).with_suffix('').parts): fn for fn in sorted(lib.rglob('*.py')) if not fn.name.startswith('_')}
    return {name: Module(name, fn.read_text()) for name,fn in found.items()}

def measure(modules):
    "The numbers that `limits` is about"
    code = [line for m in modules for line in m.code]
    def share(n): return 100*n/len(code)
    def longer(n): return sum(len(line)>n for line in code)
    total = sum(nodes(m.tree) for m in modules)
    return {
        'nodes': total,
        'nodes in a line': total/len(code),
        'nodes in a function': max(n for m in modules for n in m.functions.values()),
        '`and` and `or` in 100 lines': share(sum(isinstance(o, ast.BoolOp) for m in modules for o in ast.walk(m.tree))),
        'lines over 100 columns, in percent': share(longer(100)),
        'lines over 120 columns': sum(len(line)>120 for m in modules for line in m.lines),
        'lines of a module': max(len(m.lines) for m in modules),
        'modules beside folders': sum(m.folder==folders[-1] for m in modules)}

def reached(name, arrows, seen=()):
    "The modules that importing `name` imports"
    seen = set(seen)
    for o in arrows[name]:
        if o not in seen: seen |= {o,*reached(o, arrows, {*seen,o})}
    return seen

def circles(modules):
    "The modules that import themselves, by way of others"
    arrows = {n: [*m.imports(modules)] for n,m in modules.items()}
    return [n for n in arrows if n in reached(n, arrows)]

def upwards(modules):
    "The imports from a folder that stands after the module's own in `folders`"
    place = {n: folders.index(m.folder) for n,m in modules.items()}
    return [f'{n} imports {o}' for n,m in modules.items() for o in m.imports(modules) if place[o]>place[n]]

@pytest.fixture(scope='module')
def measured(package): return measure(package.values())

@pytest.mark.parametrize('what', limits)
def test_the_package_is_small_and_plain(measured, what): assert measured[what]<=limits[what][0]

def test_no_circle_of_imports(package):
    assert sum(len([*m.imports(package)]) for m in package.values())>50 and not circles(package)

def test_a_folder_imports_from_those_before_it(package): assert not upwards(package)

def test_the_measures():
    src = '"A docstring"\nimport os\nx = 1 # one\n\ndef f():\n    """Two\n    lines"""\n    return x and os\n'
    assert {k: v for k,v in measure([Module('a', src)]).items() if k.startswith('nodes')}=={
        'nodes':11, 'nodes in a line':11/4, 'nodes in a function':7}
    assert measure([Module('a', src)])['`and` and `or` in 100 lines']==25 and not measure([Module('b.a', src)])['modules beside folders']
    sources = {'util.a':'from ..train.b import x', 'train.b':'from .c import x', 'train.c':'from . import b'}
    made = {name: Module(name, src) for name,src in sources.items()}
    assert circles(made)==['train.b','train.c'] and upwards(made)==['util.a imports train.b']
