"""The notebooks of the repository, with the outputs that they are shipped with."""

import json

from kvjax_site.links import Site, rewritten


def pages(site: Site) -> dict[str, str]:
    """Returns the notebooks as pages of the site, and a page that lists them."""
    found, listed = {}, []
    for source, page in site.pages.items():
        if not source.endswith(".ipynb"):
            continue
        notebook = json.loads((site.root / source).read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                text = "".join(cell["source"])
                cell["source"] = rewritten(text, source, page, site)
        name = page.partition("/")[2]
        found[name] = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        listed.append(name.partition("/")[2])
    names = "\n".join(listed)
    found["notebooks/index.md"] = f"""\
# Notebooks

They run on a CPU in minutes, in `colab/` of the repository.

```{{toctree}}
{names}
```
"""
    return found
