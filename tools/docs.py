"Build a site of all notebooks, as they stand with their outputs, in _site: to browse and to search, without a network as well"
import ast,importlib,os,re,shutil,subprocess,sys,tempfile,warnings
from functools import partial
from pathlib import Path
import yaml
from fastcore.docments import MarkdownRenderer
from fastcore.nbio import read_nb
from nbdev.showdoc import showdoc_nm
from readme import blocks,code,directives,root

lib,nbs = 'fastai_amp16',root/'nbs'
library,tutorials = sorted(nbs.glob('[0-9]*.ipynb')),sorted((nbs/'tutorials').glob('*.ipynb'))
scripts = [*sorted((root/lib).glob('[!_]*.py')), *sorted((root/'benchmarks').glob('*.py'))]

def _stem(nb): return nb.stem.split('_', 1)[-1]
pages = {
    nbs/'index.ipynb': 'index.md',
    **{o: f'{_stem(o)}.md' for o in library},
    **{o: f'tutorials/{_stem(o)}.md' for o in tutorials},
    **{o: f'source/{o.parent.name}/{o.stem}.md' for o in scripts},
    **{root/o: o for o in ('CHANGELOG.md','CONTRIBUTING.md')},
    root/'benchmarks'/'README.md': 'benchmarks.md'}

# %% what is in a module
def names(text, module):
    "What the exported code `text` defines for users: a dict from names to objects"
    tree = ast.parse(text).body
    res = [showdoc_nm(o) for o in tree if isinstance(o, (ast.FunctionDef,ast.ClassDef)) and not o.name.startswith('_')]
    res += [t.id for o in tree if isinstance(o, ast.Assign) for t in o.targets if isinstance(t, ast.Name) and t.id in module.__all__]
    named = {n: eval(n, vars(module)) for o in res for n in ([o] if isinstance(o, str) else o)}
    return {n: o for n,o in named.items() if not re.search(r'\.(before|after)_\w+$', n)} # events, which fastai calls

def signature(name, o):
    "Heading, signature with the comments on its parameters, and docstring"
    if isinstance(o, partial):
        args = ', '.join([o.func.__name__, *(f'{k}={v!r}' for k,v in o.keywords.items())])
        text = f"```python\n{name} = partial({args})\n```\n\n*{o.__doc__}*"
    elif isinstance(o, dict): text = 'By name: '+', '.join(f'`{k}`' for k in o)
    elif isinstance(o, tuple): text = ', '.join(f"`{getattr(t, '__name__', t)}`" for t in o)
    elif isinstance(o, (str,float)): text = f'`{o!r}`'
    elif isinstance(o, property): text = f'*{o.__doc__}*'
    else:
        text = MarkdownRenderer(o)._repr_markdown_().replace(':NoneType=None', '=None').replace('(*args, **kwargs)', '()')
        if isinstance(o, type): text = text.replace('```python\ndef ', '```python\nclass ', 1)
    return f'### `{name}` {{ #{name} }}\n\n{text}'

def exported(cell, module):
    "What the site shows of a cell that went into a module: what it defines, and its code behind a line to click on"
    text = code(cell)
    if all(isinstance(o, (ast.Import,ast.ImportFrom,ast.With)) for o in ast.parse(text).body): return
    found,path = names(text, module),Path(module.__file__)
    yield from (signature(*o) for o in found.items())
    line = next(i for i,o in enumerate(path.read_text().splitlines()) if o.endswith(f'#{cell.id}'))+2
    parts = [f'```python\n{text}\n```', f'[{lib}/{path.name}, line {line}](../{lib}/{path.name}#__codelineno-0-{line})']
    opened = '' if found or len(text.splitlines())>30 else '+'
    yield f'???{opened} quote "Source"\n\n'+re.sub(r'^(?=.)', '    ', '\n\n'.join(parts), flags=re.M)

# %% pages
def render(nb, site):
    "The Markdown of a notebook; its pictures go into `site`"
    pngs,to = [],Path(pages[nb])
    module = importlib.import_module(f'{lib}.{_stem(nb)}') if nb in library else None
    def picture(png):
        pngs.append(png)
        path = site/'images'/f'{to.stem}-{len(pngs)}.png'
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png)
        return os.path.relpath(path, (site/to).parent)
    return '\n\n'.join(blocks(nb, picture, lambda s: linked(s, nb), lambda cell: (linked(o, nb) for o in exported(cell, module)), colored))

def colored(html):
    "A table of pandas without its own looks, which the site has as well; with the colors that code has given it"
    return re.sub(r'<style scoped>.*?</style>| border="1" class="dataframe"| style="text-align: right;"', '', html, flags=re.S)

known = {} # where the signature of each public name is
images = {} # files that are shown, and where they are on the site

def linked(text, here):
    "Links to notebooks and files as links to their pages; names in backticks as links to signatures, but not in code and headings"
    at = Path(pages[here]).parent
    def file(m):
        path = (here.parent/m[1]).resolve()
        if path.suffix=='.png': images[path] = f'images/{path.name}'
        to = pages.get(path) or images.get(path)
        return f"]({os.path.relpath(to, at)}{m[2] or ''})" if to else f']({m[1]})'
    def name(m): return f'[`{m[1]}`]({os.path.relpath(known[m[1]], at)}#{m[1]})' if m[1] in known else m[0]
    def files(s): return re.sub(r'\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)', file, s)
    def names(s): return re.sub(r'`([\w.]+)`', name, s)
    parts = re.split(r'(^ *```.*?^ *```|^#+ .*?$|\[[^\]]*\]\([^)]*\))', text, flags=re.M|re.S)
    return ''.join(files(o) if i%2 else names(o) for i,o in enumerate(parts))

def title(nb): return re.search(r'^# (.*)', read_nb(nb).cells[0].source)[1]

def _nav():
    "What stands in the menu"
    def named(nbs): return [{title(o): pages[o]} for o in nbs]
    def sources(folder): return [{o.name: pages[o]} for o in scripts if o.parent.name==folder]
    return [{'Overview': 'index.md'}, {'Tutorials': named(tutorials)}, {'Library': named(library)}, {'Benchmarks': 'benchmarks.md'},
            {'Source': sources(lib)+[{'benchmarks': sources('benchmarks')}]},
            {'Changelog': 'CHANGELOG.md'}, {'Contributing': 'CONTRIBUTING.md'}]

def _theme():
    "How it looks, by day and by night"
    def look(prefers, scheme, other):
        toggle = dict(icon='material/brightness-6', name=f'To the {other} page')
        return dict(media=f'(prefers-color-scheme: {prefers})', scheme=scheme, primary='indigo', toggle=toggle)
    features = 'navigation.tabs navigation.footer navigation.top content.code.copy search.highlight toc.follow'.split()
    palette = [look('light', 'default', 'dark'), look('dark', 'slate', 'light')]
    return dict(name='material', font=False, palette=palette, features=features)

def config(out):
    "The settings of MkDocs, which writes to `out`"
    extensions = ['attr_list', 'tables', 'admonition', 'pymdownx.details', 'pymdownx.superfences', 'pymdownx.magiclink',
                  {'pymdownx.highlight': dict(anchor_linenums=True)}, {'toc': dict(permalink=True, toc_depth=3)}]
    checks = 'omitted_files','absolute_links','unrecognized_links','anchors'
    return dict(
        site_name=lib, site_dir=str(out), docs_dir='docs', theme=_theme(), nav=_nav(), markdown_extensions=extensions,
        plugins=[{'search': dict(separator=r'[\s\-,:=\[\]()"`/.]+')}, 'offline'],
        extra_css=['site.css'], extra=dict(polyfills=['iframe-worker.js'], generator=False),
        validation=dict.fromkeys(checks, 'warn'))

def _source(path):
    "The page of a Python file"
    return f'---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(root)}\n\n```python linenums="1"\n{path.read_text()}\n```'

def _mkdocs(folder, out):
    "Let MkDocs make pages in `out` of the Markdown in `folder`; its successor is no concern of who reads this"
    (folder/'mkdocs.yml').write_text(yaml.safe_dump(config(out), sort_keys=False))
    env = {**os.environ, 'NO_MKDOCS_2_WARNING': '1'}
    subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--quiet', '--strict'], cwd=folder, check=True, env=env)

def build(out):
    "Write the site to the folder `out`"
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as d:
        warnings.simplefilter('ignore')
        site = Path(d)/'docs'
        shutil.copytree(root/'tools'/'site', site)
        for nb in library: # names first: any page may link to them
            module = importlib.import_module(f'{lib}.{_stem(nb)}')
            known.update({n: pages[nb] for c in read_nb(nb).cells if 'export' in directives(c) for n in names(code(c), module)})
        for path,to in pages.items():
            (site/to).parent.mkdir(exist_ok=True, parents=True)
            if path.suffix=='.ipynb': text = render(path, site)
            elif path.suffix=='.py': text = _source(path)
            else:
                text = linked(path.read_text(), path)
                for o in re.findall(r'\]\((\w+\.json)\)', text): shutil.copy(path.parent/o, (site/to).parent)
            (site/to).write_text(text)
        for path,to in images.items(): shutil.copy(path, site/to)
        _mkdocs(Path(d), out)
    (out/'404.html').unlink() # for servers only

if __name__=='__main__':
    build(root/'_site')
    print(f"{len(pages)} pages: open {root/'_site'/'index.html'}")
