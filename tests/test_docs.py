"README, site and notebooks show what the code does, and nothing of the machine they were made on"
import ast,importlib,inspect,json,math,re,subprocess,symtable,sys
from dataclasses import is_dataclass
from functools import partial
from html import escape,unescape
from pathlib import Path
from typing import NamedTuple
import pandas as pd
import pytest,torch
from fastai.callback.fp16 import AMPMode
from fastcore.docments import docments
from fastcore.nbio import read_nb
from markdown.extensions.toc import slugify
from torch import nn
import docs,readme,signatures
from benchmarks import report
from benchmarks.accuracy import survival
from benchmarks.shared import markdown
from benchmarks.speed import fp16_cpu,gpu
from fastai_amp16.train.decide import Next,what_next
from fastai_amp16.train.step import Step

root = Path(__file__).parent.parent
nbs = sorted((root/'nbs').rglob('*.ipynb'))
files = [*nbs, *(root/o for o in ('README.md','CONTRIBUTING.md','CHANGELOG.md','benchmarks/README.md'))]
modules = [*map(docs._module, docs.library)]

def test_readme_is_the_index():
    text,pictures = readme.make()
    assert (root/'README.md').read_text()==text, 'run `python tools/readme.py`'
    assert {p: (root/p).read_bytes() for p in pictures}==pictures and len(pictures)==len(list((root/'nbs'/'images').iterdir()))

def test_tables_lose_their_looks_in_the_readme_and_keep_their_colors_on_the_site():
    df = pd.DataFrame({'module': ['0 < 1','2'], 'bits': [1.,2.]})
    styled = df.style.format({'module': escape}).bar('bits', color='rgba(56,139,253,.35)').to_html()
    assert readme.plain(styled)!=styled==docs.colored(styled)
    def cells(html): return re.sub('<[^>]*>', ' ', html.split('</style>')[-1]).split()
    for html in (styled, df._repr_html_()):
        assert not re.search(r'<style|<\w+ [^>]*(id|class|style)=', readme.plain(html)) and cells(readme.plain(html))==cells(html)
    assert 'style' not in docs.colored(df._repr_html_())
    assert readme.plain('<th class="a" colspan="2" id="b">')=='<th colspan="2">'

def test_report_is_made_of_the_results():
    text = (root/'benchmarks'/'README.md').read_text()
    assert text==report.make(), 'run `python benchmarks/report.py`'
    for o in re.findall(r'\]\((?!https?:)([^)#]*)', text): assert (root/'benchmarks'/o).exists(), o
    listed,scripts = set(re.findall(r'^Script: \[\w+\.py\]\((\S+)\)$', text, re.M)),(root/'benchmarks').rglob('*.py')
    measure = [fn for fn in scripts if 'def main(' in fn.read_text() or fn.with_suffix('.json').exists()]
    assert listed=={str(fn.relative_to(root/'benchmarks')) for fn in measure}

def test_readme_is_short():
    "It must be read"
    assert len((root/'README.md').read_bytes())<=13_300

def test_architecture_names_what_there_is():
    text = '\n'.join(c.source for c in read_nb(root/'nbs'/'architecture.ipynb').cells)
    rows = re.findall(r'^\| `(\w+)` \|(.*)\|$', text, re.M)
    of = {fn.stem: fn for fn in (root/'fastai_amp16').rglob('[!_]*.py')}
    assert {name for name,_ in rows}=={*of}
    for module,names in rows:
        code = of[module].read_text()
        for name in re.findall(r'`(\w+)`', names): assert name=='fastai_amp16_demo' or name in code

def test_architecture_shows_the_code_as_it_is():
    shown, = [''.join(c.outputs[0]['text']) for c in read_nb(root/'nbs'/'architecture.ipynb').cells if c.source.startswith('from inspect')]
    assert shown==''.join(f"{inspect.cleandoc(chr(10)+inspect.getsource(f))}\n\n" for f in (Step.conclude, Step.decide, what_next))

def prose(fn):
    "The Markdown of a notebook, with that which its cells put out, or of a file; without code"
    cells = read_nb(fn).cells if fn.suffix=='.ipynb' else []
    put_out = [''.join(o.data['text/markdown']) for c in cells for o in c.get('outputs', []) if 'text/markdown' in o.get('data', {})]
    text = '\n\n'.join([*(c.source for c in cells if c.cell_type=='markdown'), *put_out]) if cells else fn.read_text()
    return re.sub('^ *```.*?^ *```', '', text, flags=re.M|re.S)

def places(fn):
    "What can stand after the `#` of a link: the headings of a page as the site writes them, and the names that a notebook exports"
    names = [n for n,_ in public(fn)] if fn in docs.library else []
    return {*names, *(slugify(o, '-') for o in re.findall('^#+ (.*)', prose(fn), re.M))}

@pytest.mark.parametrize('fn', files, ids=lambda o: o.stem)
def test_links(fn):
    "They lead to a file, and to a place that is there"
    for file,place in re.findall(r'\]\((?!https?:)([^)#]*)#?([^)]*)\)', prose(fn)):
        to = (fn.parent/file).resolve() if file else fn
        assert to.exists(), file
        assert not place or place in places(to), f'{file}#{place}'

def test_dead_links_are_told(tmp_path):
    (tmp_path/'a').mkdir()
    (tmp_path/'a'/'x.html').write_text('<h2 id="one"> <a href="#one">1</a> <a href="../y.html#two">2</a> <a href="https://z.org/#z">z</a>')
    (tmp_path/'y.html').write_text('<a href="a/x.html#three">3</a> <img src="a/x.png"> <a href="a">a</a>')
    assert sorted(docs.dead_links(tmp_path))==[
        'a/x.html links to ../y.html#two: there is no such place', 'y.html links to a/x.html#three: there is no such place',
        'y.html links to a/x.png: there is no such file', 'y.html links to a: there is no such file']

@pytest.mark.parametrize('fn', nbs, ids=lambda o: o.stem)
def test_pictures_are_told_in_words(fn):
    "By `#| fig-alt:`, which says more than a heading"
    headings = re.findall('^#+ (.*)', prose(fn), re.M)
    for c in read_nb(fn).cells:
        if 'hide' in readme.directives(c) or not any('image/png' in o.get('data', {}) for o in c.get('outputs', [])): continue
        assert len(readme.alt_text(c))>20 and readme.alt_text(c) not in headings, c.source

@pytest.mark.parametrize('fn', nbs, ids=lambda o: o.stem)
def test_no_sentence_is_taken_for_a_list(fn):
    "A number at the start of a line, the end of a sentence, begins a list in Markdown"
    for c in read_nb(fn).cells: assert c.cell_type!='markdown' or not re.search(r'^\s*\d{2,}\. ', c.source, re.M), c.source

debris = {'a warning': r'\w+Warning:|site-packages', 'a path': r'/(home|root|tmp|work|usr|opt|mnt|var|etc|content|Users)/|[A-Z]:\\\\',
          'a progress bar': r'progress|\r|█|\[\d+/\d+ [\d:]+<|\|[-#]{4,}\|', 'an object': r' at 0x[0-9a-f]{6}|<IPython',
          'a traceback': r'Traceback'}

@pytest.mark.parametrize('fn', nbs, ids=lambda o: o.stem)
def test_outputs_are_clean(fn):
    for c in read_nb(fn).cells:
        for o in c.get('outputs', []):
            assert o.get('name')!='stderr' and o.output_type!='error', c.source
            data = o.get('data', {})
            texts = [t for k,t in data.items() if k.startswith('text') and (k!='text/plain' or len(data)==1)]
            text = ''.join(''.join(t) for t in [o.get('text', ''), *texts])
            for what,pattern in debris.items(): assert not re.search(pattern, text), f'{what} in the output of\n{c.source}'

@pytest.mark.parametrize('fn', nbs, ids=lambda o: o.stem)
def test_opens_with_title_and_subtitle(fn): assert re.match(r'# .+\n\n> .+[^.](\n|$)', read_nb(fn).cells[0].source)

def public(*fns):
    "Names and objects that these notebooks export, or all of them"
    for fn,module in zip(docs.library, modules):
        if fns and fn not in fns: continue
        for c in read_nb(fn).cells:
            if 'export' in readme.directives(c): yield from docs.names(readme.code(c), module).items()

def functions():
    "All public functions, and public methods of public classes, by name"
    for n,o in public():
        if not isinstance(o, type): yield n,o
        elif is_dataclass(o) or '__init__' in vars(o): yield n,o if is_dataclass(o) else o.__init__
        for k,v in vars(o).items() if isinstance(o, type) else ():
            f = getattr(v, 'fget', None) or getattr(v, '__func__', None) or getattr(v, 'func', v)
            if inspect.isfunction(f) and f.__module__==o.__module__ and not re.match(r'_|(before|after)_|forward$', k): yield f'{n}.{k}',f

def unexplained(o):
    "Parameters of `o` that nothing is said of; those of a base class are explained there"
    bases = getattr(o, '__mro__', (o,object))[1:-1]
    there = {k for base in bases if is_dataclass(base) for k,v in docments(base).items() if v}
    return [k for k,v in docments(o).items() if not v and k not in {'self','cls','return','args','kwargs',*there}]

def test_parameters_are_explained():
    found = {n: unexplained(o) for n,o in functions() if callable(o) and not isinstance(o, partial)}
    assert len(found)>200 and {n: ks for n,ks in found.items() if ks}=={}

def test_docstrings():
    def has_one(o): return o.__doc__ and o.__doc__!=partial.__doc__ or getattr(o, '__name__', '')=='__init__'
    named = [*functions(), *((n,o) for n,o in public() if isinstance(o, type))]
    assert len(named)>300 and [n for n,o in named if not has_one(o)]==[]

def known(
    model:nn.Module, # What trains
    dtype:torch.dtype|None=None, # 'fp16' or `a | b`
    *args, mode:str|AMPMode=AMPMode.FP16, # One | the other
    scale=2.**-24, # Lowest
    bound=math.inf # Highest
) -> bool: # Does it train?
    "Train, perhaps"

def test_parameters_are_a_table():
    assert signatures.signature('known', known)=="""### `known` { #known data-toc-label="known" }

```{ .python .signature }
known(
    model, dtype=None, *args, mode='fp16',
    scale=2.**-24, bound=math.inf
) -> bool
```

Train, perhaps

| Parameter | Type | Default | Meaning |
| --- | --- | --- | --- |
| <code>model</code> | `nn.Module` |  | What trains |
| <code>dtype</code> | `torch.dtype` \\| `None` | <code>None</code> | `'fp16'` or `a | b` |
| <code>args</code> |  |  |  |
| <code>mode</code> | `str` \\| `AMPMode` | <code>'fp16'</code> | One \\| the other |
| <code>scale</code> | `float` | <code>2.**-24</code> | Lowest |
| <code>bound</code> | `float` | <code>math.inf</code> | Highest |
| *returns* | `bool` |  | Does it train? |"""

def untyped(x, # A number
    how=(1,2) # In which way
): # As `x`
    "Return `x`"
    def inner(
        y
    ): # Something else
        return y
    return inner(x)

class Both(NamedTuple):
    "Two things"
    first:float # The one
    second:'int|None'=None # The other

def test_the_fields_of_named_tuples_are_a_table():
    text = signatures.signature('Both', Both)
    assert 'class Both(first, second=None)' in text and '| <code>first</code> | `float` |  | The one |' in text
    assert r'| <code>second</code> | `int` \| `None` | <code>None</code> | The other |' in text

def test_what_is_returned_needs_no_type():
    assert '| *returns* |  |  | As `x` |' in signatures.signature('untyped', untyped)
    assert signatures.parameters(lambda x: x)['return']['meaning']==''

class Pair(NamedTuple):
    "Two numbers"
    a:int # The first
    b:Next = Next.again # What comes after it

    @property
    def total(self):
        "Their sum"
        return self.a

def test_fields_of_a_tuple_are_a_table():
    "And a default that is a text for readers is written by its name"
    text = signatures.signature('Pair', Pair)
    assert 'class Pair(a, b=Next.again)' in text and '| <code>a</code> | `int` |  | The first |' in text
    assert '| <code>b</code> | `Next` | <code>Next.again</code> | What comes after it |' in text
    assert '| <code>total</code> | Their sum |' in text

listed,methods = {n for n,_ in public()},{n for n,_ in functions() if '.' in n}

@pytest.mark.parametrize('fn', docs.library, ids=lambda o: o.stem)
def test_signatures_are_as_you_write_them(fn):
    "No `<class …>`, `<enum …>` or `<factory>`; all parameters in the table, and all public methods, here or with a signature of their own"
    for name,o in public(fn):
        text = signatures.signature(name, o, listed)
        assert not re.search(r'(<|&lt;)(class|enum|function|factory)\b|\bobject at\b|NoneType', text), name
        if not callable(o) or isinstance(o, partial): continue
        shown = re.findall(r'^\| <code>(\w+)', text, re.M)
        assert {k for k,p in signatures.parameters(o).items() if p['meaning']}-{'return'}<={*shown}, name
        assert {n for n in methods if n.startswith(f'{name}.')}<={*listed, *(f'{name}.{o}' for o in shown)}, name

@pytest.mark.parametrize('fn', docs.library, ids=lambda o: o.stem)
def test_code_is_behind_closed_folds_and_signatures_are_before_it(fn):
    module = docs._module(fn)
    for c in read_nb(fn).cells:
        if 'export' not in readme.directives(c): continue
        *heads,fold = [*docs.exported(c, module)] or [None]
        found = docs.names(readme.code(c), module)
        assert [*found]==re.findall(r'^### `([^`]+)`', '\n'.join(heads), re.M)
        if not fold: assert not found and re.match('import|from', readme.code(c)) # imports alone are not shown
        else:
            tag,head,*_ = fold.split('\n')
            assert re.fullmatch(r'<details(?!.* open).*>', tag) and re.fullmatch('<summary>(Source|Internal: <code>.*)</summary>', head)
            assert 'data-search-exclude' in fold and readme.code(c) in fold and bool(found)==('<summary>Source<' in fold)

answers = [ # what you type into the search, a page that answers it, and words of the answer
    ('Gradient overflow. Skipping step', 'troubleshooting.html'), ('NaN', 'tutorials/epsilon.html'),
    ('hysteresis', 'train/scaler.html'), ('keep_fp32', 'precision/plan.html'), ('master weights', 'tutorials/master_weights.html'),
    ('DataParallel', 'scaling.html'), ('loss scale', 'train/scaler.html'), ('bug', 'CONTRIBUTING.html'), ('issue', 'CONTRIBUTING.html')]

def lines_of_cells():
    "Long lines of the code that pages show, signatures aside, and of what it put out, Markdown aside"
    for c in (c for fn in nbs for c in read_nb(fn).cells if c.cell_type=='code' and not {'hide','export'} & set(readme.directives(c))):
        outs = [o.get('text') or o.data.get('text/plain', '') for o in c.get('outputs', []) if 'text/markdown' not in o.get('data', {})]
        code = '' if 'echo' in readme.directives(c) else readme.code(c)
        lines = [' '.join(o.split()) for text in (code, *map(''.join, outs)) for o in text.split('\n')]
        yield from (o for o in lines if len(o)>60)

def check_search(index):
    "Each section is in it, but no code, nothing that it put out and no source page; symptoms and tutorials count most"
    entries = [{**o, 'words': ' '.join(re.sub('<[^>]*>', '', o['title']+' '+o['text']).split())} for o in index['docs']]
    for words,page in answers: assert any(o['location'].startswith(page) and words in o['words'] for o in entries), words
    boosts = {o['location'].split('#')[0]: o['boost'] for o in entries}
    assert not any(o.startswith(('source/','notebooks/')) for o in boosts)
    assert max(boosts, key=boosts.get)=='troubleshooting.html'
    assert boosts['CONTRIBUTING.html']==boosts['tutorials/epsilon.html']>boosts['train/scaler.html']>boosts['util/nested.html']
    everything = unescape(' '.join(o['words'] for o in entries))
    assert [o for o in lines_of_cells() if o in everything]==[] and 'def _norm_role' not in everything
    assert index['config']['fields']['title']['boost']<100 # else a word in a title beats any number of words in a text

tabs = ['Start','Tutorials','How-to','Troubleshooting','API','Project']

def test_the_menu_has_what_you_import_with_a_star():
    given = vars(importlib.import_module(f'{docs.lib}.all'))
    gives = {docs._stem(fn) for fn in docs.library for n,o in public(fn) if given.get(n) is o}
    assert gives<={*docs.order} and len(docs.called)==len(docs.order)

@pytest.mark.slow
def test_site(tmp_path):
    "It can be built, with all links and anchors in order; each exported name has its signature, and nothing of it needs a network"
    docs.build(tmp_path)
    pages = {o: o.read_text() for o in tmp_path.rglob('*.html')}
    assert len(pages)==len(docs.pages)
    for n,_ in public(): assert any(re.search(rf'<h[34] id="{re.escape(n)}">', o) for o in pages.values()), n
    for path,text in pages.items():
        assert not re.search(r'href="[./]*(README\.md|examples/\w+\.py)', text), path # these have pages
        assert not re.search(r'<(script|link|img|iframe)[^>]*(src|href)="(https?:)?//', text), path
        assert re.search(r'<meta name="description" content="[^"]{10,}"', text), path
        in_boxes = re.findall('<div class="scroll(?: params| prose)?"><table|<table class="highlighttable"', text)
        assert len(re.findall('<table', text))==len(in_boxes), path
        assert not re.search(r'<details[^>]* open|&lt;details|```', text) or 'source' in path.parts, path
    for source,to in docs.pages.items(): # one link of each to its notebook, if it has one
        own = [str(Path('notebooks', source.relative_to(docs.nbs)))] if source.suffix=='.ipynb' else []
        assert [o.lstrip('./') for o in re.findall(r'href="([^"]*\.ipynb)"', pages[(tmp_path/to).with_suffix('.html')])]==own
    for o in ('accuracy/short_fits','speed/gpu'): # a tap enlarges them
        assert f'<a href="files/benchmarks/{o}.png"><img' in pages[tmp_path/'benchmarks.html']
    assert 'overflow-x: auto' in re.search(r'\.scroll \{[^}]*\}', (tmp_path/'site.css').read_text())[0]
    calls = (tmp_path/'reference.html').read_text() # on a phone, each cell says which column it is of
    row = re.search('<tr>(?:(?!</tr>).)*learn.fp16_doctor.*?</tr>', calls, re.S)[0]
    assert re.findall('<td data-head="(.*?)"', row)==['you want to','write','read']
    opened = {name: tmp_path/href for href,name in
              re.findall(r'class="md-tabs__item.*?<a href="(.*?)"[^>]*>\s*(.*?)\s*</a>', pages[tmp_path/'index.html'], re.S)}
    assert [*opened]==tabs and opened['API'].stem=='reference' and opened['Project'].stem=='CONTRIBUTING'
    alone = {name for name,path in opened.items() if re.search('<div class="md-sidebar md-sidebar--primary"[^>]* hidden', pages[path])}
    assert alone=={'Start'}
    assert any(re.search(r'<style[^>]*>[^<]*rgba\(218,54,51,.22\)', o) for o in pages.values()) # the row of the producer
    check_search(json.loads((tmp_path/'search'/'search_index.json').read_text()))

def names_in(source):
    "Names that code binds at its top level, imports aside, and names that it takes from there"
    top = symtable.symtable(source, '', 'exec')
    tables = [top]
    for t in tables: tables += t.get_children()
    bound = {o.get_name() for o in top.get_symbols() if o.is_assigned() and not o.is_imported()}
    return bound,{o.get_name() for t in tables for o in t.get_symbols() if o.is_referenced() and (t is top or o.is_global())}

@pytest.mark.parametrize('fn', nbs, ids=lambda o: o.stem)
def test_what_is_shown_needs_nothing_hidden(fn):
    "Who types what a page shows has all of its definitions"
    code = {True: [], False: []}
    for c in read_nb(fn).cells:
        if c.cell_type!='code' or {'echo','default_exp'} & set(readme.directives(c)): continue
        code['hide' in readme.directives(c)].append(readme.code(c))
    (hidden,_),(bound,used) = [names_in('\n'.join(code[o])) for o in (True,False)]
    assert not (hidden-bound) & used

@pytest.mark.slow
@pytest.mark.not_as_cuda('it computes as CUDA does anyway')
def test_survival(tmp_path):
    "A part of the trainings, since test_healing trains all of them, and all events; the whole table is in the benchmarks"
    old = json.loads((root/'benchmarks'/'accuracy'/'survival.json').read_text())
    only = [*list(survival.trainings)[::4],*survival.events]
    script = sys.executable,'-W','ignore',root/'benchmarks'/'accuracy'/'survival.py'
    subprocess.run([*script, '--only', *only, '--out', tmp_path/'x.json'], check=True)
    assert json.loads((tmp_path/'x.json').read_text())['rows']==[r for r in old['rows'] if r['what'] in only]
    assert [r['what'] for r in old['rows']]==list(survival.everything)

def test_results_in_the_readme_are_those_of_the_benchmarks():
    "The cells of its notebook that read them give what is stored, and test_readme holds the README to that"
    cells = [c for c in read_nb(root/'nbs'/'index.ipynb').cells if c.cell_type=='code']
    helpers, = [ast.parse(c.source).body for c in cells if 'def found' in c.source]
    plain = ast.Import,ast.ImportFrom,ast.FunctionDef
    space = dict(root=root/'nbs')
    exec(compile(ast.Module([o for o in helpers if isinstance(o, plain)], []), 'helpers', 'exec'), space)
    told = [c for c in cells if 'echo' in readme.directives(c) and 'text/markdown' in c.outputs[0].data]
    shown = [c for c in told if 'learn.mixed' not in readme.code(c)] # needs the fit
    assert len(shown)==3
    for c in shown:
        *before,result = ast.parse(c.source).body
        exec(compile(ast.Module(before, []), 'cell', 'exec'), space)
        assert eval(compile(ast.Expression(result.value), 'cell', 'eval'), space).data==''.join(c.outputs[0].data['text/markdown'])

def test_the_warning_on_a_cpu_says_what_was_measured():
    rows = report.stored(fp16_cpu)['rows']
    slower, = [r['slower']['to_fp16_dynamic'][1] for r in rows if r['network']=='ResNet-18']
    assert f'a ResNet-18 takes {slower:.0f} times as long' in (root/'fastai_amp16'/'diagnosis'/'messages.py').read_text()

def test_what_a_gpu_did_is_in_the_readme():
    "The ratios of each model, and as the span of all but one, of which the README tells as well"
    res,text = report.stored(gpu),' '.join((root/'README.md').read_text().split())
    def over(base, key='samples_per_second'): return gpu.ratios(res, 'to_fp16_dynamic', base, key)
    sizes,others = res['arguments']['bs'],[o for o in res['arguments']['models'] if o!='large_predictions']
    columns = over('fp32'),over('fp32', 'peak_mib'),over('to_fp16_fused')
    for m in res['arguments']['models']: assert ' | '.join(' / '.join(f'{o[m,bs]:.2f}' for bs in sizes) for o in columns) in text
    for o in (*columns,over('to_fp16')): assert markdown.span(v for (m,_),v in o.items() if m in others) in text
    least,at = min((columns[-1]['large_predictions',bs],bs) for bs in sizes)
    assert f'{least:.2f} of `to_fp16` with a fused AdamW (batches of {at}, ' in text and res['machine'] in text

def test_what_a_gpu_did_comes_to_the_report_by_itself(tmp_path, monkeypatch):
    "As `benchmarks/speed/gpu.py` writes it"
    def section():
        title = '### Whole trainings on a GPU'
        return ' '.join(report.make().split(title)[1].split('\n### ')[0].split())
    text = section()
    assert 'one was compared with fp32 (this version compares two, and has not been timed)' in text and 'with an earlier version' in text
    others = {o: report.stored(o) for scripts in report.contents.values() for o in scripts if o is not gpu}
    monkeypatch.setattr(report, 'stored', lambda script: others.get(script) or json.loads((tmp_path/'gpu.json').read_text()))
    args = '--toy --size 32 --seq 8 --steps 2 --skip 1 --rounds 1 --bs 2 --models vit_small resnet50 --contenders'
    contenders = 'to_fp16 to_fp16_fused to_fp16_dynamic to_bf16_dynamic'
    res = gpu.main([*f'{args} {contenders} --out'.split(), str(tmp_path/'gpu.json')])
    text = section()
    for r in res['rows']: assert f'| {gpu.cell(r)} |' in text
    assert '](speed/gpu.png)' in text and res['machine'] in text
    assert '`vit_small` and `resnet50` had one round' in text and 'Large predictions' not in text and 'earlier version' not in text
    assert 'The script can also measure `regnet_y_32gf`' in text and '`large_predictions`, `fp32`, `to_bf16`' in text
    fused = gpu.ratios(res, 'to_fp16_dynamic', 'to_fp16_fused').values()
    assert f'{markdown.span(fused)} times as many as `to_fp16` with a fused AdamW' in text
    ours,bf16 = res['rows'][6:8] # of the ResNet
    assert ('**Batch norms can be slower' in text)==(bf16['samples_per_second']<ours['samples_per_second'])

def test_warnings_name_entries_of_troubleshooting():
    "Each heading that a message of the package sends you to is there"
    nodes = [o for fn in (root/'fastai_amp16').rglob('*.py') for o in ast.walk(ast.parse(fn.read_text()))]
    texts = [o.value for o in nodes if isinstance(o, ast.Constant) and isinstance(o.value, str)]
    named = {o for text in texts for o in re.findall('See "(.*?)" in Troubleshooting', text)}
    page = '\n'.join(c.source for c in read_nb(root/'nbs'/'troubleshooting.ipynb').cells if c.cell_type=='markdown')
    assert len(named)>5 and named<={*re.findall('^### (.*)', page, re.M)}
