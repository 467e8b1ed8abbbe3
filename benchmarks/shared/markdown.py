"Tables, numbers and lists of the report"

def table(
    head, # Names of columns
    rows, # An iterable of rows, each an iterable of cells
    align='lr' # `l`, `r` or `c` for each column, from the left; the last one is for all further columns, too
) -> str:
    "A Markdown table"
    head = [*head]
    align += align[-1]*(len(head)-len(align))
    rule = [dict(l='---', r='--:', c=':-:')[o] for o in align[:len(head)]]
    return '\n'.join('| '+' | '.join(map(str, o))+' |' for o in (head,rule,*rows))

def with_quartiles(
    q, # First quartile, median and third quartile
    spec='.2f' # How to format each
):
    "The median, and the quartiles in parentheses"
    first,median,third = (format(o, spec) for o in q)
    return f'{median} ({first} to {third})'

def span(xs, spec='.2f'):
    "The smallest and the largest number"
    xs = [*xs]
    return f'{min(xs):{spec}} to {max(xs):{spec}}'

def listed(xs):
    "`a, b and c`"
    *xs,last = map(str, xs)
    return f"{', '.join(xs)} and {last}" if xs else last

def versions(
    libraries:dict # From names to versions
):
    "Libraries with their versions"
    return ', '.join(f'{k} {v}' for k,v in libraries.items())

def met(
    rows, # Rows with quartiles
    key, # Name of the quartiles
    goal:float # The largest median that meets the goal
):
    "A goal, and in how many of the rows it is met"
    return f"the goal was {goal:.2f}; met in {sum(r[key][1]<=goal for r in rows)} of {len(rows)} rows"
