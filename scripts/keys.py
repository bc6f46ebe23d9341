"""Write docs/keys.md from the table in `packtrain.sources.keys`."""

from pathlib import Path

from packtrain.sources.keys import page

if __name__ == "__main__":
    Path(__file__).parent.parent.joinpath("docs", "keys.md").write_text(page(), encoding="utf-8")
