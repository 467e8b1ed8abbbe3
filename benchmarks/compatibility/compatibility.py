"The test cells of fastai's own notebooks, unchanged and with every learner in half precision"
import ast,functools,importlib,json,math,os,re,subprocess,sys,tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
import fastai
from benchmarks.shared import markdown
from benchmarks.shared.script import parser,store

modes = ('plain','to_fp16','to_fp16_dynamic','to_bf16_dynamic')
builds = re.compile(r'\bLearner\(|synth_learner\(|_learner\(') # a notebook is about learners if a test cell matches this
# fastai imports timm if it is installed
needs = {'a download': r'URLError|HTTPError|ConnectionError|ConnectTimeout|gaierror|Max retries exceeded|getaddrinfo|resolve',
         'a GPU': r'CUDA|NVIDIA|assert.*cuda', 'a package': r"No module named|name 'timm' is not defined"}

# %% notebooks
def _directives(source): return set(re.findall(r'^#\s*\|\s*([\w-]+)', source, re.M))

def read(
    path # Path of a notebook
): # The name of the module it defines, or `None`, and its code cells as pairs: source, and whether it is exported to the module
    "Reads the code cells of a notebook that can run"
    cells = [(o['cell_type'], ''.join(o['source'])) for o in json.loads(Path(path).read_text())['cells']]
    code = [s for kind,s in cells if kind=='code' and s.strip() and not re.search(r'^#\s*\|\s*eval:\s*false', s, re.M)]
    module = next((m[1] for s in code if (m := re.search(r'^#\s*\|\s*default_exp\s+([\w.]+)', s, re.M))), None)
    if any(kind=='raw' and re.search(r'skip_exec:\s*true', s) for kind,s in cells): return module,[]
    return module,[(s,bool(_directives(s)&{'export','exporti','exports','default_exp'})) for s in code]

def is_test(source, exported):
    "Whether a cell is a test: neither exported to the module nor part of building the notebook"
    return not exported and 'nbdev_export' not in source

def tests(path):
    "The sources of the test cells of the notebook at `path`"
    return [s for s,exported in read(path)[1] if is_test(s, exported)]

def notebooks(
    checkout, # A checkout of fastai's repository
    only=() # Parts of names, or empty for all notebooks
) -> list:
    "The notebooks that build learners"
    paths = sorted(Path(checkout, 'nbs').glob('[!_]*.ipynb'))
    return [p for p in paths if any(map(builds.search, tests(p))) and (not only or any(o in p.stem for o in only))]

# %% one notebook in one mode, in its own process
def _convert(mode):
    "Puts every new learner that has parameters into half precision"
    import fastai.callback.fp16 # noqa: F401 (it adds methods to `Learner`, as does the next import)
    from fastai.learner import Learner
    if mode.endswith('dynamic'): import fastai_amp16.all # noqa: F401
    init = Learner.__init__
    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if any(True for _ in getattr(self.model, 'parameters', list)()): getattr(self, mode)()
    Learner.__init__ = __init__

def _defines(source):
    "The names that a cell defines"
    try: nodes = list(ast.walk(ast.parse(re.sub(r'^\s*[%!].*$', 'pass', source, flags=re.M))))
    except SyntaxError: return set()
    return {o.id for o in nodes if isinstance(o, ast.Name) and isinstance(o.ctx, ast.Store)}|{
        o.name for o in nodes if isinstance(o, (ast.FunctionDef,ast.ClassDef))}|{
        (o.asname or o.name).split('.')[0] for o in nodes if isinstance(o, ast.alias)}

def _only(source, *kinds):
    "The statements of a cell that are of the given kinds"
    return '\n'.join(ast.unparse(o) for o in ast.parse(source).body if isinstance(o, kinds))

def run_cells(
    path, # Path of the notebook
    mode:str, # One of `modes`
    out # File to which each test cell adds a line of JSON: its `error`, and the earlier cell that caused it
):
    "Run all test cells of a notebook, each from the same random state, even after failures. Exported code comes from the module"
    from IPython.core.interactiveshell import InteractiveShell
    from fastai.torch_core import defaults,set_seed # and not from `basics`, which imports more
    os.chdir(Path(path).parent)
    shell,missing,(module,cells) = InteractiveShell.instance(),{},read(path)
    for source,exported in cells:
        if exported: shell.run_cell(_only(source, ast.Import, ast.ImportFrom))
    callbacks = list(getattr(defaults, 'callbacks', [])) # only the notebook may add more, not our other imports
    if module: shell.user_ns.update({k:v for k,v in vars(importlib.import_module(f'fastai.{module}')).items() if not k.startswith('__')})
    if mode!='plain': _convert(mode)
    if mode=='to_fp16': from benchmarks.shared.fastais import fastais
    else: fastais = nullcontext
    defaults.callbacks = callbacks
    i = -1
    with open(out, 'w') as f,fastais():
        for source,exported in cells:
            if exported: shell.run_cell(_only(source, ast.If))
            if not is_test(source, exported): continue
            set_seed(42)
            i += 1
            gpu = 'cuda' in _directives(source)
            e = None if gpu else shell.run_cell(source).error_in_exec
            error = 'CUDA: not run' if gpu else f'{type(e).__name__}: {e}'[:2000] if e else None
            if error: missing.update({k: i for k in _defines(source) if k not in shell.user_ns})
            print(json.dumps(dict(error=error, follows=missing.get(getattr(e, 'name', None)))), file=f, flush=True)

def outcomes(
    path, # Path of the notebook
    mode:str, # One of `modes`
    limit:float # Timeout in seconds
) -> list: # A dict for each test cell
    "Run a notebook in its own process"
    env = {**os.environ, 'MPLBACKEND': 'agg', 'OMP_NUM_THREADS': '1'}
    with tempfile.TemporaryDirectory() as d:
        out = Path(d)/'out'
        command = [sys.executable, __file__, '--run', str(Path(path).resolve()), mode, str(out)]
        try: subprocess.run(command, env=env, timeout=limit, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired: pass
        res = [*map(json.loads, out.read_text().splitlines())] if out.exists() else []
    return res+[dict(error='time is up', follows=None)]*(len(tests(path))-len(res))

# %% all notebooks
def lacks(
    cells:list, # The outcomes of an unchanged notebook
    i:int # The index of a cell
): # A key of `needs`, or `None`
    "What the cell, or the cell that made it fail, needs and the machine does not have"
    c = cells[i]
    if c['error'] is None: return None
    if c['follows'] is not None: return lacks(cells, c['follows'])
    return next((k for k,v in needs.items() if re.search(v, c['error'])), None)

def row(path, limit):
    "The results of a notebook in all modes"
    runs = {mode: outcomes(path, mode, limit) for mode in modes}
    plain = runs['plain']
    able = [i for i,c in enumerate(plain) if c['error'] is None]
    differs = [dict(cell=i, mode=mode, source=tests(path)[i], **runs[mode][i]) for mode in modes for i in able if runs[mode][i]['error']]
    without = [lacks(plain, i) for i in range(len(plain))]
    return dict(notebook=path.stem, cells=len(plain), passed={mode: sum(runs[mode][i]['error'] is None for i in able) for mode in modes},
                lacks={k: without.count(k) for k in needs}, differs=differs,
                fails=[dict(cell=i, error=c['error']) for i,c in enumerate(plain) if c['error'] and not without[i]])

# %% the result
def reason(
    d:dict # A cell that passes unchanged and fails in half precision
) -> str: # A phrase to follow "the cell …"
    "Why it fails, as far as its source and error tell"
    if d['follows'] is not None: return 'follows from another cell that fails'
    if re.search(r'len\(\w+\.cbs\)', d['source']): return 'counts callbacks, and mixed precision adds one'
    if 'HookCallback' in d['source'] and '.stored' in d['source']:
        return 'reads a gradient from a hook during the backward pass, where it is still multiplied by the loss scale'
    numbers = [*map(float, re.findall(r'-?\d+\.\d*(?:e[+-]?\d+)?', d['error']))]
    n = len(numbers)//2
    near = n and all(math.isclose(a, b, rel_tol=0.01, abs_tol=1e-3) for a,b in zip(numbers[:n], numbers[n:]))
    return "compares numbers more closely than half precision allows" if near else f"raises `{d['error'].splitlines()[0][:100]}`"

def table(res):
    "A Markdown table with a row for each notebook of which half precision fails a cell, one for the others, and one for all"
    rows = [r for r in res['rows'] if r['passed']['plain']]
    def line(name, rows):
        numbers = [sum(r['cells'] for r in rows), *(sum(r['lacks'][k] for r in rows) for k in needs),
                   *(sum(r['passed'][m] for r in rows) for m in modes)]
        return name,*numbers
    head = ['notebook', 'cells', *(f'need {k}' for k in needs), 'pass unchanged', *(f'pass with `{m}`' for m in modes[1:])]
    differ = [r for r in rows if len({r['passed'][m] for m in modes})>1]
    others = [r for r in rows if r not in differ]
    body = [*(line(r['notebook'], [r]) for r in differ), line(f'{len(others)} others', others), line('**all**', rows)]
    return markdown.table(head, body)

def differing(res):
    "Markdown: the cells that pass unchanged and fail with this package, by reason"
    found = {}
    for r in res['rows']:
        for d in r['differs']:
            if not d['mode'].endswith('dynamic'): continue
            found.setdefault(reason(d), {}).setdefault((r['notebook'],d['cell']), []).append(f"`{d['mode']}`")
    def line(why, cells):
        books,how = ', '.join(dict.fromkeys(book for book,_ in cells)),' and '.join(dict.fromkeys(m for ms in cells.values() for m in ms))
        return f"- {len(cells)} {'cells' if len(cells)>1 else 'cell'} in {books}, with {how}: {'each' if len(cells)>1 else 'it'} {why}."
    return '\n'.join(line(*o) for o in found.items())

def section(res):
    rows = res['rows']
    def passed(mode): return sum(r['passed'][mode] for r in rows)
    why = {**{f'need {k}': sum(r['lacks'][k] for r in rows) for k in needs}, 'cannot pass unchanged': sum(len(r['fails']) for r in rows)}
    return f"""### fastai's own notebooks

Of {passed('plain')} test cells in fastai's notebooks that pass unchanged, {passed('to_fp16_dynamic')} pass with `to_fp16_dynamic`,
{passed('to_bf16_dynamic')} with `to_bf16_dynamic`, and {passed('to_fp16')} with fastai's `to_fp16`.

These cells pass unchanged, but not with this package:

{differing(res)}

These are the {len(rows)} notebooks of fastai that build learners. Each runs unchanged, and once per precision with every new learner in
half precision. They have {sum(r['cells'] for r in rows)} test cells, of which {markdown.listed(f'{n} {k}' for k,n in why.items() if n)}.
{markdown.ran(res, f"notebooks of version {res['checkout']}")}"""

def main(args=None):
    p = parser(__file__, __doc__, limit=(600.,'timeout in seconds for a notebook in one mode'))
    p.add_argument('--fastai', required=True, help="a checkout of fastai's repository")
    p.add_argument('--only', nargs='*', default=[], help='parts of the names of notebooks')
    a = p.parse_args(args)
    from benchmarks.shared.machine import machine
    checkout = re.search(r'__version__\s*=\s*"(.+)"', Path(a.fastai, 'fastai', '__init__.py').read_text())[1]
    with ThreadPoolExecutor(2) as pool: rows = list(pool.map(lambda o: row(o, a.limit), notebooks(a.fastai, a.only)))
    res = dict(machine=machine(), fastai=fastai.__version__, checkout=checkout, rows=rows)
    store(res, a.out)
    print(table(res))

if __name__=='__main__':
    if sys.argv[1:2]==['--run']: run_cells(*sys.argv[2:])
    else: main()
