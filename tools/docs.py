"Build a site of all notebooks, as they stand with their outputs, in _site: to browse and to search, without a network as well"
import ast,importlib,os,re,shutil,subprocess,sys,tempfile,warnings
from html import escape
from pathlib import Path
import yaml
from fastcore.nbio import read_nb
from nbdev.showdoc import showdoc_nm
from readme import blocks,code,directives,root
from signatures import signature

lib,nbs = 'fastai_amp16',root/'nbs'
folders = 'util','precision','train','optim','diagnosis','.' # of modules, as they import each other
library = [o for f in folders for o in sorted((nbs/f).glob('[0-9]*.ipynb'))]
tutorials,moving = (sorted((nbs/f).glob('*.ipynb')) for f in ('tutorials','moving'))
troubleshooting,practice,exceptions,scaling,reference,architecture,faults = guides = [
    nbs/f'{o}.ipynb' for o in ('troubleshooting','in_practice','not_restored','scaling','reference','architecture','fastai_faults')]
scripts = [*sorted((root/lib).rglob('[!_]*.py')), *sorted((root/'benchmarks').rglob('*.py')), *sorted((root/'examples').glob('*.py'))]

def _stem(nb): return re.sub(r'^\d+_', '', nb.stem)
def _inside_nbs(nb): return nb.parent.relative_to(nbs)/_stem(nb)
pages = {
    nbs/'index.ipynb': 'index.md',
    **{o: str(_inside_nbs(o).with_suffix('.md')) for o in [*library, *guides, *tutorials, *moving]},
    **{o: f"source/{o.relative_to(root).with_suffix('.md')}" for o in scripts},
    **{root/o: o for o in ('CHANGELOG.md','CONTRIBUTING.md')},
    root/'benchmarks'/'README.md': 'benchmarks.md'}

def _module(nb): return importlib.import_module('.'.join([lib, *_inside_nbs(nb).parts])) if nb in library else None

# %% what is in a module
def names(text, module):
    "What the exported code `text` defines for users: a dict from names to objects"
    tree = ast.parse(text).body
    res = [showdoc_nm(o) for o in tree if isinstance(o, (ast.FunctionDef,ast.ClassDef)) and not o.name.startswith('_')]
    res += [t.id for o in tree if isinstance(o, ast.Assign) for t in o.targets if isinstance(t, ast.Name) and t.id in module.__all__]
    named = {n: eval(n, vars(module)) for o in res for n in ([o] if isinstance(o, str) else o)}
    return {n: o for n,o in named.items() if not re.search(r'\.(before|after)_\w+$', n)} # events, which fastai calls

def _inside(text):
    "What the private code `text` is, in HTML: its names, and what the longest definition says of itself"
    tree = ast.parse(text).body
    defs = [o for o in tree if isinstance(o, (ast.FunctionDef,ast.ClassDef))]
    set_ = [t.id for o in tree if isinstance(o, ast.Assign) for to in o.targets for t in ast.walk(to) if isinstance(t, ast.Name)]
    found = list(dict.fromkeys([*(o.name for o in defs), *set_]))
    said = sorted((o.end_lineno-o.lineno, doc.split('\n')[0].rstrip('.')) for o in defs if (doc := ast.get_docstring(o)))
    res = ', '.join(f'`{n}`' for n in found[:4])+(f' and {len(found)-4} more' if len(found)>4 else '')
    return re.sub('`([^`]+)`', r'<code>\1</code>', escape(res+(f': {said[-1][1]}' if said else ''), quote=False))

def folded(title, text):
    "Markdown behind a line to click on, which the search leaves out"
    return f'<details class="quote" data-search-exclude="true" markdown="1">\n<summary>{title}</summary>\n\n{text}\n\n</details>'

def exported(cell, module):
    "What the site shows of a cell that went into a module: what it defines, and its code behind a line to click on"
    text = code(cell)
    if all(isinstance(o, (ast.Import,ast.ImportFrom,ast.With)) for o in ast.parse(text).body): return
    found,path = names(text, module),Path(module.__file__)
    yield from (signature(*o, known) for o in found.items())
    line = next(i for i,o in enumerate(path.read_text().splitlines()) if o.endswith(f'#{cell.id}'))+2
    name,up = module.__name__.replace('.', '/'),'../'*module.__name__.count('.')
    link = f'[{name}.py, line {line}]({up}{name}.py#__codelineno-0-{line})'
    yield folded('Source' if found else f'Internal: {_inside(text)}', f'```python\n{text}\n```\n\n{link}')

# %% pages
def render(nb, site):
    "The Markdown of a notebook; its pictures go into `site`"
    pngs,to = [],Path(pages[nb])
    module = _module(nb)
    def picture(png):
        pngs.append(png)
        path = site/'images'/f'{to.stem}-{len(pngs)}.png'
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png)
        return os.path.relpath(path, (site/to).parent)
    first,*rest = blocks(nb, picture, lambda s: linked(s, nb), lambda cell: (linked(o, nb) for o in exported(cell, module)), colored)
    is_inside = False
    for i,o in enumerate(rest): # the contents of a page name what you call, and of the rest the headings
        for heading in re.findall('^## (.*)', o, re.M): is_inside = heading.startswith('Inside')
        if is_inside and o.startswith('### `'): rest[i] = f'#{o}'
    text = '\n\n'.join([_with_module(first, module) if module else first, *rest])
    return re.sub(r'^!\[([^]]*)\]\(([^)]*)\)$', r'[![\1](\2)](\2)', text, flags=re.M) # a tap enlarges it

def _with_module(opening, module):
    "The opening of a page, with where its code is after title and subtitle"
    name,(head,sub,*rest) = module.__name__,opening.split('\n\n')
    source = '../'*(name.count('.')-1)+f"source/{name.replace('.', '/')}.md"
    return '\n\n'.join([head, sub, f'*Module* <code>{name}</code> · [source]({source})', *rest])

def colored(html):
    "A table of pandas without its own looks, which the site has as well; with the colors that code has given it"
    return re.sub(r'<style scoped>.*?</style>| border="1" class="dataframe"| style="text-align: right;"', '', html, flags=re.S)

known = {} # public names, and methods of fastai's `Learner` without it: the page of the signature, its anchor, and the object
images = {} # files that are shown, and where they are on the site

def is_meant(name, here):
    "Does `name` on the page of `here` mean what has this name? An ordinary word does so where the module has it, or all are listed"
    obj,module = known[name][2],_module(here)
    if here.stem=='architecture' or not re.fullmatch('[a-z]+', name): return True
    return module is not None and vars(module).get(name) is obj

def linked(text, here):
    "Links to notebooks and files as links to their pages; names in backticks as links to signatures, but not in code and headings"
    at = Path(pages[here]).parent
    def file(m):
        path = (here.parent/m[1]).resolve()
        if path==root/'README.md': path = nbs/'index.ipynb'
        if path.suffix=='.png': images[path] = f'images/{path.name}'
        to = pages.get(path) or images.get(path)
        return f"]({os.path.relpath(to, at)}{m[2] or ''})" if to else f']({m[1]})'
    def name(m):
        if m[2] not in known or not is_meant(m[2], here): return m[0]
        page,anchor,_ = known[m[2]]
        return f'[`{m[1]}`]({os.path.relpath(page, at)}#{anchor})'
    def module(m): # at the start of a row
        to = next((to for o,to in pages.items() if o in library and _stem(o)==m[1] or o==root/lib/f'{m[1]}.py' and m[1]=='all'), None)
        return f'[`{m[1]}`]({to})' if to and here in guides else m[0]
    def files(s): return re.sub(r'\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)', file, s)
    def names(s): return re.sub(r'`((?:learn\.)?([\w.]+)(?:\([^`]*\))?)`', name, s)
    text = re.sub(r'(?<=^\| )`(\w+)`(?= \|)', module, text, flags=re.M)
    parts = re.split(r'(^ *```.*?^ *```|^#+ .*?$|\[[^\]]*\]\([^)]*\)|<summary>.*?</summary>)', text, flags=re.M|re.S)
    return ''.join(files(o) if i%2 else names(o) for i,o in enumerate(parts))

def _know(nb):
    "Note where the public names of a notebook are"
    module = _module(nb)
    found = {n: o for c in read_nb(nb).cells if 'export' in directives(c) for n,o in names(code(c), module).items()}
    known.update({k: (pages[nb],n,o) for n,o in found.items() for k in (n, re.sub(r'^Learner\.', '', n))})

def title(nb): return re.search(r'^# (.*)', read_nb(nb).cells[0].source)[1]

imports = [o for o in ast.parse((root/lib/'all.py').read_text()).body if isinstance(o, ast.ImportFrom)]
for_all = {n for o in imports for n in ([o.module.split('.')[-1]] if o.module else [a.name for a in o.names])}
def is_for_all(nb):
    "Does `import *` give something of a library notebook?"
    return _stem(nb) in for_all

def _nav():
    "What stands in the menu"
    def named(nbs): return [{title(o): pages[o]} for o in nbs]
    def sources(folder): return [{str(o.relative_to(root/folder)): pages[o]} for o in scripts if root/folder in o.parents]
    def of_folder(f): return [o for o in library if o.parent==nbs/f and o not in called]
    order = 'learner callback messages doctor swap ask report history clip optimizer plan scaler'.split() # as you need them
    called = sorted(filter(is_for_all, library), key=lambda o: order.index(_stem(o)))
    others = [{f: named(of_folder(f))} for f in folders[:-1] if of_folder(f)]+named(of_folder('.'))
    parts = [{'For training': named(called)}, {'For those who read the code': [*named([architecture]), *others]}]
    project = [{'Source': [{o: sources(o)} for o in (lib,'benchmarks','examples')]}, {'Changelog': 'CHANGELOG.md'},
               {'Contributing': [{'How to': 'CONTRIBUTING.md'}, *named([faults])]}]
    return [{'Get started': 'index.md'}, *named([troubleshooting]), {'Tutorials': named(tutorials)}, {'Moving': named(moving)},
            {title(practice): named([practice,exceptions])}, *named([scaling,reference]), {'Library': parts},
            {'Benchmarks': 'benchmarks.md'}, {'Project': project}]

def _theme():
    "How it looks, by day and by night"
    def look(prefers, scheme, icon, other):
        toggle = dict(icon=f'material/{icon}', name=f'Switch to {other} mode')
        return dict(media=f'(prefers-color-scheme: {prefers})', scheme=scheme, primary='indigo', toggle=toggle)
    features = 'navigation.tabs navigation.sections navigation.footer navigation.top content.code.copy search.highlight toc.follow'.split()
    palette = [look('light', 'default', 'weather-night', 'dark'), look('dark', 'slate', 'weather-sunny', 'light')]
    return dict(name='material', font=False, palette=palette, features=features, icon=dict(logo='material/scale-balance'))

# %% what a search finds, and what it says of a page
def described(text):
    "What the Markdown of a page says first, in plain words: its subtitle, or the first sentence"
    first = next(o for o in re.split(r'\n\s*\n', text) if o.strip() and not re.match(r'#|<|\||```|!\[', o.strip()))
    words = ' '.join(re.sub(r'\[([^\]]*)\]\([^)]*\)|[`*]', r'\1', re.sub('^> ?', '', first, flags=re.M)).split())
    return re.match(r'.+?[.:](?= |$)|.+', words)[0].rstrip(':.')

def of_source(path):
    "What a Python file is: its docstring, or the subtitle of the notebook that it is made from"
    doc = ast.get_docstring(ast.parse(path.read_text()))
    nb = next((o for o in library if _stem(o)==path.stem and root/lib in path.parents), None)
    return (doc or (described(read_nb(nb).cells[0].source) if nb else f'The code of {path.name}')).split('\n\n')[0]

def weight(path):
    "How much a word on a page counts in a search, beside one on a page of the library that `import *` gives"
    if path==troubleshooting: return 6. # begins with what people see
    if _stem(path) in ('learner','callback','in_practice'): return 4. # where most questions are answered
    if path in (*tutorials, *moving, *guides) or path.stem=='index': return 2.
    return 1. if path in library and is_for_all(path) else .25

def with_meta(text, path):
    "The page `text` of the file `path` with its description, and what a search makes of it"
    is_source = path.suffix=='.py'
    search = dict(exclude=True) if is_source else dict(boost=weight(path))
    meta = dict(description=of_source(path) if is_source else described(text), search=search)
    if is_source: meta['hide'] = ['toc'] # room for the lines
    return f'---\n{yaml.safe_dump(meta, allow_unicode=True, sort_keys=False)}---\n\n{text}'

def boxed(html):
    """Each table in a box that it can be scrolled in, so that no page is wider than a phone; but not the table that holds a Python file

    A phone shows the cells of a table of parameters or sentences below each other, with the names of their columns."""
    def cells(row, tag): return [re.sub('<.*?>', '', o, flags=re.S).strip() for o in re.findall(f'<{tag}\\b.*?>(.*?)</{tag}>', row, re.S)]
    def box(m):
        table,heads = m[0],cells(m[0].partition('</thead>')[0], 'th')
        rows = re.findall('<tr.*?</tr>', table, re.S)
        is_prose = any(len(o)>60 for row in rows for o in cells(row, 'td')[1:])
        kind = ' params' if 'Parameter' in heads else ' prose' if is_prose else ''
        def named(row):
            names = iter(heads[row[0].count('<th'):]) # an index is a `th`
            return re.sub('<td', lambda _: f'<td data-head="{escape(next(names, ""))}"', row[0])
        if kind==' prose': table = re.sub('<tr.*?</tr>', named, table, flags=re.S)
        return f'<div class="scroll{kind}">{table}</div>'
    return re.sub(r'<table(?! class="highlighttable").*?</table>', box, html, flags=re.S)

def config(out):
    "The settings of MkDocs, which writes to `out`"
    extensions = ['attr_list', 'sane_lists', 'tables', 'md_in_html', 'pymdownx.superfences', 'pymdownx.magiclink',
                  {'pymdownx.highlight': dict(anchor_linenums=True)}, {'toc': dict(permalink=True, toc_depth=3)}]
    checks = 'omitted_files','absolute_links','unrecognized_links','anchors'
    return dict(
        site_name=lib, site_dir=str(out), docs_dir='docs', theme=_theme(), nav=_nav(), markdown_extensions=extensions,
        plugins=[{'search': dict(separator=r'[\s\-,:=\[\]()"`/.]+', fields=dict(title=dict(boost=10.)))}, 'offline'],
        extra_css=['site.css'], extra=dict(polyfills=['iframe-worker.js'], generator=False),
        validation=dict.fromkeys(checks, 'warn'))

def _source(path):
    "The page of a Python file, which may have fences of three backticks itself"
    return f'# {path.relative_to(root)}\n\n``````python linenums="1"\n{path.read_text()}\n``````'

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
        for nb in library: _know(nb) # first: any page may link to them
        for path,to in pages.items():
            (site/to).parent.mkdir(exist_ok=True, parents=True)
            if path.suffix=='.ipynb': text = render(path, site)
            elif path.suffix=='.py': text = _source(path)
            else:
                text = linked(path.read_text(), path)
                for o in re.findall(r'\]\(([\w/]+\.json)\)', text):
                    (site/to).parent.joinpath(o).parent.mkdir(exist_ok=True, parents=True)
                    shutil.copy(path.parent/o, (site/to).parent/o)
            (site/to).write_text(with_meta(text, path))
        for path,to in images.items(): shutil.copy(path, site/to)
        _mkdocs(Path(d), out)
    (out/'404.html').unlink() # for servers only
    for o in out.rglob('*.html'): o.write_text(boxed(o.read_text()))

if __name__=='__main__':
    build(root/'_site')
    print(f"{len(pages)} pages: open {root/'_site'/'index.html'}")
