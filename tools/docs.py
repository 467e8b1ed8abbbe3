"Build a site of all notebooks, as they stand with their outputs, in _site: to browse and to search, without a network as well"
import ast,importlib,os,re,shutil,subprocess,sys,tempfile,warnings
from html import escape,unescape
from pathlib import Path
from urllib.parse import unquote
import yaml
from fastcore.nbio import read_nb
from nbdev.showdoc import showdoc_nm
from readme import blocks,code,directives,root
from signatures import signature

lib,nbs = 'fastai_amp16',root/'nbs'
folders = 'util','precision','train','optim','diagnosis','.' # of modules, as they import each other
library = [o for f in folders for o in sorted((nbs/f).glob('[0-9]*.ipynb'))]
tutorials,moving,guides = (sorted(nbs.glob(o)) for o in ('tutorials/*.ipynb','moving/*.ipynb','[!0-9]*.ipynb'))
guides.remove(index := nbs/'index.ipynb')
troubleshooting,practice,reference,architecture,faults = placed = [
    nbs/f'{o}.ipynb' for o in ('troubleshooting','in_practice','reference','architecture','fastai_faults')]
contributing = root/'CONTRIBUTING.md'
scripts = [*sorted((root/lib).rglob('[!_]*.py')), *sorted((root/'benchmarks').rglob('*.py')), *sorted((root/'examples').glob('*.py'))]

def _stem(nb): return re.sub(r'^\d+_', '', nb.stem)
def _inside_nbs(nb): return nb.parent.relative_to(nbs)/_stem(nb)
pages = {
    index: 'index.md',
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
    "What the private code `text` is, in HTML: its names, and what it says of itself if it is one definition"
    tree = ast.parse(text).body
    defs = [o for o in tree if isinstance(o, (ast.FunctionDef,ast.ClassDef))]
    set_ = [t.id for o in tree if isinstance(o, ast.Assign) for to in o.targets for t in ast.walk(to) if isinstance(t, ast.Name)]
    found = list(dict.fromkeys([*(o.name for o in defs), *set_]))
    said = (ast.get_docstring(defs[0]) or '').split('\n')[0].rstrip('.') if len(defs)==1 else ''
    res = ', '.join(f'`{n}`' for n in found[:4])+(f' and {len(found)-4} more' if len(found)>4 else '')
    return re.sub('`([^`]+)`', r'<code>\1</code>', escape(res+(f': {said}' if said else ''), quote=False))

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
    widths,to = {},Path(pages[nb])
    module = _module(nb)
    def picture(png):
        path = site/'images'/f'{to.stem}-{len(widths)+1}.png'
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png)
        res = os.path.relpath(path, (site/to).parent)
        widths[res] = int.from_bytes(png[16:20], 'big')*3//5 # of 200 dots per inch: makes its 10 points as large as the text
        return res
    first,*rest = blocks(nb, picture, lambda s: linked(s, nb), lambda cell: (linked(o, nb) for o in exported(cell, module)), _unsearched)
    is_inside = False
    for i,o in enumerate(rest): # the contents of a page name what you call, and of the rest the headings
        for heading in re.findall('^## (.*)', o, re.M): is_inside = heading.startswith('Inside')
        if is_inside and o.startswith('### `'): rest[i] = f'#{o}'
    text = '\n\n'.join([_with_files(first, nb, module), *rest])
    text = re.sub('^```(python|text)$', r'```{ .\1 data-search-exclude="true" }', text, flags=re.M) # a search is for what is said
    return enlargeable(text, widths)

def enlargeable(text, widths):
    "The Markdown `text` with links from pictures to their files, so that a tap enlarges them, and with the widths that are known"
    def link(m): return f'[{m[0]}'+(f'{{ width="{widths[m[2]]}" }}' if m[2] in widths else '')+f']({m[2]})'
    return re.sub(r'^!\[([^]]*)\]\(([^)]*)\)$', link, text, flags=re.M)

def _with_files(opening, nb, module):
    "The opening of a page, with the module and the notebook that it is of after title and subtitle"
    inside,(head,sub,*rest) = nb.relative_to(nbs),opening.split('\n\n')
    up,name = '../'*(len(inside.parts)-1),module.__name__ if module else ''
    source = f"*Module* <code>{name}</code> · [source]({up}source/{name.replace('.', '/')}.md) · " if module else ''
    said = 'notebook' if module else 'Download this page as a notebook'
    line = f'{source}[{said}]({up}notebooks/{inside}){{ download="{nb.name}" }}\n{{: .files }}'
    return '\n\n'.join([head, sub, line, *rest])

def colored(html):
    "A table of pandas without its own looks, which the site has as well; with the colors that code has given it"
    return re.sub(r'<style scoped>.*?</style>| border="1" class="dataframe"| style="text-align: right;"', '', html, flags=re.S)

def _unsearched(html): return f'<div data-search-exclude="true">\n{colored(html)}\n</div>'

known = {} # public names, and methods of fastai's `Learner` without it: the page of the signature, its anchor, and the object
files = {} # pictures and results that pages link to, and where they are on the site

def is_meant(name, here):
    "Does `name` on the page of `here` mean what has this name? An ordinary word does so where the module has it, or all are listed"
    obj,module = known[name][2],_module(here)
    if here.stem=='architecture' or not re.fullmatch('[a-z]+', name): return True
    return module is not None and vars(module).get(name) is obj

def linked(text, here):
    """Links to notebooks and files as links to their pages, or as code if they have none

    Names in backticks become links to signatures, but not in code and headings."""
    at = Path(pages[here]).parent
    def file(m):
        path = (here.parent/m[2]).resolve()
        if path==root/'README.md': path = index
        if path.suffix in ('.png','.json') and path.exists(): files[path] = str(Path('files', path.relative_to(root)))
        to = pages.get(path) or files.get(path)
        if to: return f"[{m[1]}]({os.path.relpath(to, at)}{m[3] or ''})"
        return f"`{m[1].strip('`')}`" if path.is_file() else m[0]
    def name(m):
        if m[2] not in known or not is_meant(m[2], here): return m[0]
        page,anchor,_ = known[m[2]]
        return f'[`{m[1]}`]({os.path.relpath(page, at)}#{anchor})'
    def module(m): # at the start of a row
        to = next((to for o,to in pages.items() if o in library and _stem(o)==m[1] or o==root/lib/f'{m[1]}.py' and m[1]=='all'), None)
        return f'[`{m[1]}`]({to})' if to and here in guides else m[0]
    def link(s): return re.sub(r'\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)', file, s)
    def names(s): return re.sub(r'`((?:learn\.)?([\w.]+)(?:\([^`]*\))?)`', name, s)
    text = re.sub(r'(?<=^\| )`(\w+)`(?= \|)', module, text, flags=re.M)
    parts = re.split(r'(^ *```.*?^ *```|^#+ .*?$|\[[^\]]*\]\([^)]*\)|<summary>.*?</summary>)', text, flags=re.M|re.S)
    return ''.join(link(o) if i%2 else names(o) for i,o in enumerate(parts))

def _know(nb):
    "Note where the public names of a notebook are"
    module = _module(nb)
    found = {n: o for c in read_nb(nb).cells if 'export' in directives(c) for n,o in names(code(c), module).items()}
    known.update({k: (pages[nb],n,o) for n,o in found.items() for k in (n, re.sub(r'^Learner\.', '', n))})

def title(nb): return re.search(r'^# (.*)', read_nb(nb).cells[0].source)[1]

order = 'learner callback checkpoint speed doctor report ask history headroom compare messages clip optimizer plan scaler swap'.split()
called = [o for name in order for o in library if _stem(o)==name] # as you need them
demo,messages = nbs/'05_demo.ipynb',nbs/'diagnosis'/'10_messages.ipynb'

short = {'reference': 'All calls', 'libraries': 'Other libraries', 'overview': 'Overview'} # names in the menu

def _nav():
    "What stands in the menu: a tab for each thing that a reader may want"
    def named(nbs): return [{short.get(_stem(o)) or re.sub('^From |`', '', title(o)): pages[o]} for o in nbs]
    def sources(folder): return [{str(o.relative_to(root/folder)): pages[o]} for o in scripts if root/folder in o.parents]
    def inside(f): return named(o for o in library if o.parent==nbs/f and o not in (*called,demo))
    how_to = [practice, *(o for o in guides if o not in placed), *(o for o in tutorials if _stem(o)=='libraries')]
    for_readers = [*named([architecture]), *({f: inside(f)} for f in folders[:-1] if inside(f)), *inside('.')]
    return [
        {'Start': pages[index]},
        {'Tutorials': named([*(o for o in tutorials if o not in how_to), demo])},
        {'How-to': [*named(how_to), {'Moving': named(moving)}]},
        {'Troubleshooting': named([troubleshooting, messages])},
        {'API': [*named([reference]), {'For training': named(o for o in called if o!=messages)}, {'Inside': for_readers}]},
        {'Project': [{'Contributing': pages[contributing]}, {'Changelog': 'CHANGELOG.md'}, {'Benchmarks': 'benchmarks.md'},
                     *named([faults]), {'Source': [{o: sources(o)} for o in (lib,'benchmarks','examples')]}]}]

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
    if path in (*tutorials, *moving, *guides, index, contributing): return 2.
    return 1. if path in called else .25

def with_meta(text, path):
    "The page `text` of the file `path` with its description, and what a search makes of it"
    is_source = path.suffix=='.py'
    search = dict(exclude=True) if is_source else dict(boost=weight(path))
    meta = dict(description=of_source(path) if is_source else described(text), search=search)
    if is_source: meta['hide'] = ['toc'] # room for the lines
    if path==index: meta['hide'] = ['navigation'] # a tab of one page
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
    return dict(
        site_name=lib, site_dir=str(out), docs_dir='docs', theme=_theme(), nav=_nav(), markdown_extensions=extensions,
        plugins=[{'search': dict(separator=r'[\s\-,:=\[\]()"`/.]+', fields=dict(title=dict(boost=10.)))}, 'offline'],
        extra_css=['site.css'], extra=dict(polyfills=['iframe-worker.js'], generator=False),
        validation=dict(nav=dict(omitted_files='warn'), links=dict(not_found='ignore'))) # `dead_links` sees to these

def _source(path):
    "The page of a Python file, which may have fences of three backticks itself"
    return f'# {path.relative_to(root)}\n\n``````python linenums="1"\n{path.read_text()}\n``````'

def _mkdocs(folder, out):
    "Let MkDocs make pages in `out` of the Markdown in `folder`; its successor is no concern of who reads this"
    (folder/'mkdocs.yml').write_text(yaml.safe_dump(config(out), sort_keys=False))
    env = {**os.environ, 'NO_MKDOCS_2_WARNING': '1'}
    res = subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--strict'], cwd=folder, env=env, capture_output=True, text=True)
    if res.returncode: raise SystemExit(res.stderr)

def dead_links(out):
    "A sentence on each link within the site in the folder `out` that leads to no file, or to no place in it"
    texts = {o: o.read_text() for o in out.rglob('*.html')}
    places = {o: {unescape(i) for i in re.findall(r'\s(?:id|name)="([^"]*)"', text)} for o,text in texts.items()}
    for page,text in texts.items():
        for link in {*re.findall(r'\s(?:href|src)="(?!\w+:|//)([^"]*)"', text)}:
            file,_,place = unquote(unescape(link)).partition('#')
            to = Path(os.path.normpath(page.parent/file)) if file else page
            if not to.is_file(): yield f'{page.relative_to(out)} links to {link}: there is no such file'
            elif place and place not in places.get(to, [place]): yield f'{page.relative_to(out)} links to {link}: there is no such place'

def build(out):
    "Write the site to the folder `out`"
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as d:
        warnings.simplefilter('ignore')
        site = Path(d)/'docs'
        shutil.copytree(root/'tools'/'site', site)
        shutil.copytree(nbs, site/'notebooks', ignore=shutil.ignore_patterns('.*','*.yml','images','__pycache__'))
        for nb in library: _know(nb) # first: any page may link to them
        for path,to in pages.items():
            (site/to).parent.mkdir(exist_ok=True, parents=True)
            if path.suffix=='.ipynb': text = render(path, site)
            elif path.suffix=='.py': text = _source(path)
            else: text = enlargeable(linked(path.read_text(), path), {})
            (site/to).write_text(with_meta(text, path))
        for path,to in files.items():
            (site/to).parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(path, site/to)
        _mkdocs(Path(d), out)
    (out/'404.html').unlink() # for servers only
    for o in out.rglob('*.html'): o.write_text(boxed(o.read_text()))
    if dead := sorted(dead_links(out)): raise SystemExit('\n'.join(dead))

if __name__=='__main__':
    build(root/'_site')
    print(f"{len(pages)} pages: open {root/'_site'/'index.html'}")
