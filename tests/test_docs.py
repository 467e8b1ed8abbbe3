"README, site and notebooks show what the code does, and nothing of the machine they were made on"
import importlib,json,re
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
import pytest
from fastcore.docments import docments
from fastcore.nbio import read_nb
import docs,readme,survival

root = Path(__file__).parent.parent
nbs = sorted((root/'nbs').rglob('*.ipynb'))
modules = [importlib.import_module(f'fastai_amp16.{fn.stem.split("_", 1)[1]}') for fn in docs.library]

def test_readme_is_the_index():
    text,pictures = readme.make()
    assert (root/'README.md').read_text()==text, 'run `python tools/readme.py`'
    assert {p: (root/p).read_bytes() for p in pictures}==pictures and len(pictures)==len(list((root/'nbs'/'images').iterdir()))

def test_readme_names_what_there_is():
    text = (root/'README.md').read_text()
    for o in re.findall(r'\]\((?!https?:)([^)#]*)', text): assert (root/o).exists(), o
    rows = re.findall(r'^\| `(\w+)` \|(.*)\|$', text, re.M)
    assert {name for name,_ in rows}=={fn.stem for fn in (root/'fastai_amp16').glob('[!_]*.py')}
    for module,names in rows:
        code = (root/f'fastai_amp16/{module}.py').read_text()
        for name in re.findall(r'`(\w+)`', names): assert name=='fastai_amp16_demo' or name in code

@pytest.mark.parametrize('fn', nbs, ids=lambda o: o.stem)
def test_links(fn):
    text = '\n'.join(c.source for c in read_nb(fn).cells if c.cell_type=='markdown')
    for o in re.findall(r'\]\((?!https?:|#)([^)#]*)', text): assert (fn.parent/o).exists(), o

debris = {'a warning': r'\w+Warning:|site-packages', 'a path': r'/(home|root|tmp|work|usr|content|Users)/|[A-Z]:\\\\', 'a progress bar': r'progress|\r|█', 'an address': r' at 0x[0-9a-f]{6}',
          'a traceback': r'Traceback'}

@pytest.mark.parametrize('fn', nbs, ids=lambda o: o.stem)
def test_outputs_are_clean(fn):
    for c in read_nb(fn).cells:
        for o in c.get('outputs', []):
            assert o.get('name')!='stderr' and o.output_type!='error', c.source
            text = ''.join(''.join(t) for t in [o.get('text', ''), *(t for k,t in o.get('data', {}).items() if k.startswith('text'))])
            for what,pattern in debris.items(): assert not re.search(pattern, text), f'{what} in the output of\n{c.source}'

@pytest.mark.parametrize('fn', nbs, ids=lambda o: o.stem)
def test_opens_with_title_and_subtitle(fn): assert re.match(r'# .+\n\n> .+[^.](\n|$)', read_nb(fn).cells[0].source)

def public():
    for fn,module in zip(docs.library, modules):
        for c in read_nb(fn).cells:
            if 'export' in readme.directives(c): yield from docs.names(readme.code(c), module).items()

@pytest.mark.parametrize('name,o', [(n,o) for n,o in public() if callable(o)], ids=lambda o: o if isinstance(o, str) else '')
def test_docstrings_and_docments(name, o):
    assert o.__doc__ and o.__doc__!=partial.__doc__
    if isinstance(o, partial): return
    own = o if not isinstance(o, type) or is_dataclass(o) else vars(o).get('__init__')
    assert not [k for k,v in docments(own).items() if not v and k not in ('self','return','args','kwargs')] if own else True

def test_site(tmp_path):
    "All pages can be made; each exported name has its signature, and links to notebooks are links to pages"
    docs.known.update({n: 'x.md' for n,_ in public()})
    text = '\n'.join(docs.render(fn, tmp_path) for fn in nbs)
    for n,_ in public(): assert f'### `{n}` {{' in text
    assert not re.search(r'\]\([^)]*ipynb', text)
    for o in re.findall(r'!\[[^\]]*\]\((?:\.\./)*(images/[^)]*)', text): assert (tmp_path/o).exists()

few = [*survival.events, *list(survival.trainings)[:2]]
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('what', few)
def test_survival(what):
    "The README's table is what its script finds, here in part"
    rows = {o['what']: o for o in json.loads((root/'benchmarks'/'survival.json').read_text())['rows']}
    assert survival.row(what, survival.everything[what])==rows[what] and list(rows)==list(survival.everything)
