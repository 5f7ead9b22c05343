"""Write the generated pages.

cd tests && python -m pages
"""

from __future__ import annotations

from . import DOCS, GENERATED

for name, page in GENERATED.items():
    (DOCS / name).write_text(page())
    print(f"wrote docs/{name}")
