"The repository agrees with itself: modules match notebooks, notebooks are clean and run, the code is checked by ruff"
import ast,base64,json,re,runpy,shutil,struct,subprocess,sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile
import matplotlib.pyplot as plt
import pytest,torch
from fastcore.basics import AttrDict
from fastcore.nbio import read_nb
from nbdev.clean import nbdev_clean
from nbdev.config import get_config
from nbdev.doclinks import nbdev_export
from nbdev.test import test_nb as run_nb
from readme import directives

root = Path(__file__).parent.parent
cfg = get_config(root)
lib = cfg.lib_path.name
# pages that are whole trainings; others show the same features in a few steps
train = '''00_half_precision 01_death_spiral 02_master_weights 03_exploding_gradients 03_pytorch 04_epsilon 05_demo 05_lr_find
           06_reports 08_gallery'''.split()
nbs = sorted((root/'nbs').rglob('*.ipynb'), key=lambda o: -o.stat().st_size) # long ones first, so that all processes end together

@pytest.fixture(scope='module')
def fresh(tmp_path_factory):
    "The modules and notebooks that `nbdev-export` and `nbdev-clean` make from the committed notebooks"
    d = tmp_path_factory.mktemp('repo')
    shutil.copytree(root/'nbs', d/'nbs')
    for o in ['pyproject.toml', f'{lib}/__init__.py', f'{lib}/all.py']: # these are written by hand
        (d/o).parent.mkdir(exist_ok=True)
        shutil.copy(root/o, d/o)
    nbdev_export(path=d)
    nbdev_clean(fname=d/'nbs')
    return d

@pytest.mark.parametrize('fn', [*sorted((root/lib).rglob('*.py')), *nbs], ids=lambda o: o.name)
def test_in_step(fresh, fn): assert (fresh/fn.relative_to(root)).read_text() == fn.read_text()

def size(kind, data):
    "How much is put out: the width and height of a picture, the rows of a table, the lines of a text"
    text = ''.join(data)
    if kind=='image/png': return struct.unpack('>II', base64.b64decode(text)[16:24])
    if kind=='text/html': return [text.count('<tr')]
    return [len(text.strip().split('\n'))]

def shown(cell):
    "The kind and the size of each thing that a cell puts out; a table counts once, though it is there as text, too"
    outs = [o for o in cell.get('outputs', []) if o.get('name')!='stderr'] # matplotlib may be building its font cache
    found = [o.get('data') or {o.get('name', o.output_type): o.get('text', '')} for o in outs]
    return [(k, size(k, data[k])) for data in found for k in sorted(data) if k!='text/plain' or len(data)==1]

def is_stale(stored, now):
    "Is what a cell puts out `now` of another kind or another size than what is stored? Labels with other digits change a picture a little"
    if [k for k,_ in stored]!=[k for k,_ in now]: return True
    return any(abs(a-b)>(k=='image/png')*.03*a for (k,olds),(_,news) in zip(stored, now) for a,b in zip(olds, news))

def test_what_is_stale():
    "A line more or less is; a tick label of other digits is not, and neither are other numbers"
    def text(s): return shown({'outputs': [AttrDict(output_type='stream', name='stdout', text=s)]})
    def table(n): return shown({'outputs': [AttrDict(output_type='display_data', data={'text/plain': 'x', 'text/html': '<tr></tr>'*n})]})
    def picture(*at):
        png = base64.b64encode(bytes(16)+struct.pack('>II', *at)).decode()
        return shown({'outputs': [AttrDict(output_type='display_data', data={'text/plain': '<Figure>', 'image/png': png})]})
    for old,new,stale in [(text('a 1\nb'), text(['a 2\n','b\n']), False), (text('a\nb'), text('a'), True), (text('a'), table(1), True),
                          (table(3), table(3), False), (table(3), table(2), True),
                          (picture(1200,600), picture(1180,610), False), (picture(1200,600), picture(1200,700), True)]:
        assert is_stale(old, new)==stale

@pytest.mark.not_as_cuda('what is stored was computed on a CPU')
@pytest.mark.filterwarnings('always::fastai_amp16.all.PrecisionWarning') # a page shows them
@pytest.mark.parametrize('fn', [pytest.param(o, id=o.stem, marks=[pytest.mark.slow]*(o.stem in train)) for o in nbs])
def test_notebook(fn, monkeypatch):
    "It runs, and puts out what is stored, in kind and size: numbers and pixels differ between machines and versions of libraries"
    computed = []
    plt.close('all') # a figure that another test left open would be shown
    monkeypatch.setattr(torch.cpu, 'get_capabilities', dict, raising=False) # else the doctor finds more, or less
    monkeypatch.setattr('nbdev.test.write_nb', lambda nb, fn: computed.extend(nb.cells))
    assert run_nb(fn, skip_flags=cfg.tst_flags, basepath=root, save=True)[0]
    flagged = [set(cfg.tst_flags) & set(directives(o)) for o in read_nb(fn).cells]
    stale = [(shown(o), shown(now), o.source) for o,now,skip in zip(read_nb(fn).cells, computed, flagged)
             if not skip and is_stale(shown(o), shown(now))]
    assert not stale, 'run the notebook again and store what it shows (stored, now, cell):\n'+'\n'.join(map(str, stale))

def test_ruff():
    res = subprocess.run([sys.executable, '-m', 'ruff', 'check', '.'], cwd=root, capture_output=True, text=True)
    assert res.returncode==0, res.stdout

def trees():
    "The modules and scripts as syntax trees"
    for fn in [*cfg.lib_path.rglob('*.py'), *(root/'benchmarks').rglob('*.py'), *(root/'tools').glob('*.py')]:
        if fn.name!='_modidx.py': yield fn.name,ast.parse(fn.read_text())

def test_functions_are_simple():
    "By ruff's measure"
    options = ['--select', 'C901', '--config', 'lint.mccabe.max-complexity=10', '--output-format', 'json']
    res = subprocess.run([sys.executable, '-m', 'ruff', 'check', lib, *options], cwd=root, capture_output=True, text=True)
    assert {re.search('`(.*)`', o['message'])[1] for o in json.loads(res.stdout)}==set()

def is_torchs(name):
    "Is this an attribute of torch's tensors or modules that is private to torch?"
    return bool(re.match('_[^_]', name)) and any(hasattr(o, name) for o in (torch.Tensor,torch.nn.Module()))

def private_to_torch(tree):
    "The names private to torch that a module uses: below `torch`, imported from there, and attributes of others than `self`"
    for o in ast.walk(tree):
        if isinstance(o, ast.ImportFrom) and (o.module or '').startswith('torch'):
            yield from (n for n in (*o.module.split('.'),*(a.name for a in o.names)) if n.startswith('_'))
        elif isinstance(o, ast.Attribute):
            text = ast.unparse(o)
            if text.startswith('torch.'): yield from (n for n in text.split('.') if re.match('_[^_]', n))
            elif is_torchs(o.attr) and text.split('.')[0]!='self': yield o.attr
        elif isinstance(o, ast.Constant) and isinstance(o.value, str) and is_torchs(o.value): yield o.value

def test_names_private_to_torch_are_in_one_module():
    modules = [(fn, ast.parse(fn.read_text())) for fn in cfg.lib_path.rglob('*.py')]
    found = {fn.stem: set(private_to_torch(tree)) for fn,tree in modules if fn.stem!='torch_private'}
    assert {k: names for k,names in found.items() if names}=={}
    assert {*private_to_torch(ast.parse('from torch._a import b; torch._C.f(t._base, getattr(m, "_parameters"), self._base)'))}=={
        '_a','_C','_base','_parameters'}

def test_nothing_private_is_imported_from_another_module():
    imports = [(name,o) for name,tree in trees() for o in ast.walk(tree)
               if isinstance(o, ast.ImportFrom) and (o.level or lib in (o.module or ''))]
    assert len(imports)>50 and not [f'{name}: {a.name}' for name,o in imports for a in o.names if a.name.startswith('_')]

def test_ci_runs_the_command_of_the_readme_and_then_the_rest():
    commands = re.findall('^uv run pytest.*', (root/'.ci'/'run').read_text(), re.M)
    assert commands==['uv run pytest','uv run pytest -m slow'] and "-m 'not slow'" in (root/'pyproject.toml').read_text()
    assert re.search('^uv run pytest #', (root/'README.md').read_text(), re.M)
    for o in ('uv run pytest','uv run pytest -m "slow or not slow"'): assert f'| `{o}` |' in (root/'CONTRIBUTING.md').read_text()

def test_the_page_on_pypi_has_no_links_to_files(monkeypatch):
    "The README stands there without the repository"
    given = {}
    monkeypatch.chdir(root)
    setuptools = SimpleNamespace(setup=given.update, find_packages=lambda **kwargs: [lib])
    monkeypatch.setitem(sys.modules, 'setuptools', setuptools) # not every Python has it
    runpy.run_path('setup.py')
    text = given['long_description']
    def links(text): return re.findall(r'\]\((?!https?:)[^)]*\)', text)
    readme = (root/'README.md').read_text()
    assert links(readme) and not links(text)
    assert readme.startswith(text) and 'learn.to_fp16_dynamic()' in text and 300<len(text)<len(readme)

def test_the_wheel_says_that_it_has_types(tmp_path):
    "Built from a copy, since setuptools leaves files beside the sources"
    for o in ('pyproject.toml','settings.ini','setup.py','README.md','LICENSE'): shutil.copy(root/o, tmp_path)
    shutil.copytree(root/lib, tmp_path/lib)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    res = subprocess.run([sys.executable, '-c', build], cwd=tmp_path, capture_output=True, text=True)
    assert res.returncode==0, res.stderr
    wheel, = tmp_path.glob('*.whl')
    assert {f'{lib}/{o}' for o in ('py.typed','all.pyi','all.py')} <= {*ZipFile(wheel).namelist()}
