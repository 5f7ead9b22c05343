"""Write what is generated, and the project's address where another one is.

cd tests && python -m pages
"""

from __future__ import annotations

import subprocess
import sys

from . import GENERATED, ROOT, with_address

for file, text in with_address().items():
    file.write_text(text)
    print(f"wrote the project's address into {file.relative_to(ROOT)}")
for name, text in GENERATED.items():
    file, new = ROOT / name, text()
    if file.read_text() != new:
        file.write_text(new)
        print(f"wrote {name}")
        if file.suffix == ".py":  # the rest is made by the new patches
            sys.exit(subprocess.call([sys.executable, "-m", "pages"]))
