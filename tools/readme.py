"Write README.md and its pictures from nbs/index.ipynb, as it stands with its outputs"
import base64,re
from pathlib import Path
from fastcore.nbio import read_nb

root = Path(__file__).resolve().parent.parent

def directives(cell): return re.findall(r'^#\| *(\w+)', cell.source, re.M) if cell.cell_type=='code' else []

def code(cell): return '\n'.join(o for o in cell.source.splitlines() if not o.startswith('#|')).strip()

def _text(o): return ''.join(o) # notebooks hold lists of lines, or a string

def outputs(
    cell, # A code cell
    picture # Takes the bytes of a PNG, returns the path to show it by
) -> list: # Of Markdown: printed text and values fenced, tables of pandas as HTML without its styles, pictures
    "What the cell shows"
    res = []
    for o in cell.get('outputs', []):
        data = o.get('data', {})
        if 'image/png' in data: res.append(f"![]({picture(base64.b64decode(_text(data['image/png'])))})")
        elif 'text/markdown' in data: res.append(_text(data['text/markdown']))
        elif 'text/html' in data:
            html = re.sub(r'<style.*?</style>| border="1" class="dataframe"| style="text-align: right;"', '', _text(data['text/html']), flags=re.S)
            res.append(re.sub(r'\s*\n\s*(</tr|</?t[dh])', r'\1', re.sub(r'\n\s*', '\n', html)).strip()) # a line for each row
        else: res.append(f"```text\n{_text(o.get('text') or data.get('text/plain', '')).rstrip()}\n```")
    return res

def make():
    "The text of README.md, and a dict from the paths of its pictures to their bytes"
    pictures,parts = {},[]
    def picture(png):
        path = f'nbs/images/index-{len(pictures)+1}.png'
        pictures[path] = png
        return path
    for cell in read_nb(root/'nbs'/'index.ipynb').cells:
        if cell.cell_type=='markdown': parts.append(re.sub(r'\]\((?!https?:|#)([^)]+)\)', r'](nbs/\1)', cell.source).replace('](nbs/../', ']('))
        elif cell.cell_type=='code' and 'hide' not in directives(cell):
            if 'echo' not in directives(cell) and code(cell): parts.append(f'```python\n{code(cell)}\n```')
            parts += outputs(cell, picture)
    return '\n\n'.join(o.strip() for o in parts)+'\n',pictures

if __name__=='__main__':
    text,pictures = make()
    (root/'README.md').write_text(text, encoding='utf-8')
    for o in (root/'nbs'/'images').glob('index-*.png'): o.unlink()
    for path,png in pictures.items():
        (root/path).parent.mkdir(exist_ok=True)
        (root/path).write_bytes(png)
