"Write README.md and its pictures from nbs/index.ipynb, as it stands with its outputs"
import base64,re
from pathlib import Path
from textwrap import fill
from fastcore.nbio import read_nb

root = Path(__file__).resolve().parent.parent

def directives(cell): return re.findall(r'^#\| *(\w+)', cell.source, re.M) if cell.cell_type=='code' else []

def alt_text(cell):
    "What its picture shows, in words: as `#| fig-alt:` says, which Quarto reads as well"
    return ''.join(re.findall(r'^#\| *fig-alt: *(.*)$', cell.source, re.M))

def code(cell): return '\n'.join(o for o in cell.source.splitlines() if not o.startswith('#|')).strip()

def _text(o): return ''.join(o) # notebooks hold lists of lines, or a string

def _wrapped(line):
    "A sentence in lines of 88 characters, as a box of the site holds; a row of a table as it is"
    is_row = '   ' in line.strip()
    return line if is_row or len(line)<=90 else fill(line, 88, subsequent_indent='    ', break_long_words=False)

def plain(html):
    "Tables without looks: no styles, and no attributes that only these need"
    html = re.sub(r'<style.*?</style>', '', html, flags=re.S)
    return re.sub(r'(<(?:table|thead|tbody|tr|th|td)\b)[^>]*', lambda m: m[1]+''.join(re.findall(r' (?:col|row)span="\d+"', m[0])), html)

def _shown(
    o, # What a cell put out
    picture, # Takes the bytes of a PNG, returns the path to show it by
    alt:str, # Says in words what a picture shows
    text, # What becomes of Markdown
    table # What becomes of HTML
) -> str: # Markdown: printed text and values fenced, HTML with a line for each row of a table
    data = o.get('data', {})
    if 'image/png' in data: return f"![{alt}]({picture(base64.b64decode(_text(data['image/png'])))})"
    if 'text/markdown' in data: return text(_text(data['text/markdown']))
    if 'text/html' in data:
        html = re.sub(r'\n\s*', '\n', table(_text(data['text/html'])))
        return re.sub(r'\s*\n\s*(</tr|</?t[dh])', r'\1', html).strip()
    lines = _text(o.get('text') or data.get('text/plain', '')).rstrip().split('\n')
    return '```text\n'+'\n'.join(map(_wrapped, lines))+'\n```'

def blocks(
    nb:Path, # A notebook
    picture, # As in `_shown`
    text=lambda s: s, # What becomes of Markdown
    exported=lambda cell: (), # What is shown of a cell that goes into a module: an iterable of Markdown
    table=plain # What becomes of HTML
):
    "The Markdown of a notebook, piece by piece"
    for cell in read_nb(nb).cells:
        if cell.cell_type=='markdown': yield text(cell.source)
        elif cell.cell_type=='code' and not {'hide','default_exp'} & set(directives(cell)):
            if 'export' in directives(cell): yield from exported(cell)
            else:
                if 'echo' not in directives(cell) and code(cell): yield f'```python\n{code(cell)}\n```'
                yield from (_shown(o, picture, alt_text(cell), text, table) for o in cell.get('outputs', []))

def make():
    "The text of README.md, and a dict from the paths of its pictures to their bytes"
    pictures = {}
    def picture(png):
        path = f'nbs/images/index-{len(pictures)+1}.png'
        pictures[path] = png
        return path
    def text(s): return re.sub(r'\]\((?!https?:|#)([^)]+)\)', r'](nbs/\1)', s).replace('](nbs/../', '](')
    return '\n\n'.join(o.strip() for o in blocks(root/'nbs'/'index.ipynb', picture, text))+'\n',pictures

if __name__=='__main__':
    text,pictures = make()
    (root/'README.md').write_text(text, encoding='utf-8')
    for o in (root/'nbs'/'images').glob('index-*.png'): o.unlink()
    for path,png in pictures.items():
        (root/path).parent.mkdir(exist_ok=True)
        (root/path).write_bytes(png)
