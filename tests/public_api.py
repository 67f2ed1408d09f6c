#!/usr/bin/env python3
"""Compares the public API of the crate `flexring` with tests/public_api.txt, and checks that every item has an example, or a link to one.

    cargo doc --no-deps && tests/public_api.py [FOLDER OF THE DOCUMENTATION]

FLEXRING_BLESS=1 writes the file. The source is rustdoc's HTML, because its JSON needs a nightly compiler.
"""

import difflib
import html.parser
import os
import pathlib
import re
import sys

LISTING = pathlib.Path(__file__).with_name("public_api.txt")
# As many as a user can read.
MOST_ITEMS = 150
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
# Auto traits that programs rely on.
AUTO_TRAITS = ("Send", "Sync")
# Implemented by `derive`, not for programs.
OF_THE_COMPILER = ("StructuralPartialEq",)
# Types of cust, which is documented only where it can be built.
OF_CUST = ("DeviceBuffer",)


class Page(html.parser.HTMLParser):
    """What one page says about its item."""

    def __init__(self, text):
        super().__init__()
        self.declaration, self.methods, self.implemented = "", [], []
        self.links, self.has_example = [], False
        self.open, self.section, self.text = [], "", None
        self.feed(text)

    def inside(self, name):
        return any(name in classes for _, _, classes in self.open)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        classes = (attributes.get("class") or "").split()
        if tag in VOID:
            return
        self.open.append((tag, attributes.get("id") or "", classes))
        if tag == "h2":
            self.section = attributes.get("id") or ""
        if tag == "a" and self.inside("docblock"):
            self.links.append(attributes.get("href") or "")
        self.has_example |= "example-wrap" in classes
        if "item-decl" in classes or "code-header" in classes:
            self.text = ""

    def handle_endtag(self, tag):
        while self.open:
            opened, _, classes = self.open.pop()
            if opened == tag:
                break
        if "item-decl" in classes:
            self.declaration, self.text = self.text, None
        elif tag == "div" and self.text is not None:
            self.text += "\n"
        elif "code-header" in classes:
            text = " ".join(self.text.split())
            self.code_header(text.replace("( ", "(").replace(", )", ")"))
            self.text = None

    def handle_data(self, data):
        if self.text is not None and not self.inside("hideme"):
            self.text += data

    def code_header(self, text):
        identity = next((id for tag, id, _ in reversed(self.open) if tag == "section"), "")
        # On a trait's page, those of types that have no page here.
        if self.section in ("trait-implementations", "foreign-impls"):
            left_out = [f" {name} for" for name in OF_THE_COMPILER] + [f" for {name}<" for name in OF_CUST]
            if text.startswith(("impl", "unsafe impl")) and not any(part in text for part in left_out):
                self.implemented.append(text)
        elif self.section == "synthetic-implementations":
            if re.match(r"impl(<.*?>)? (%s) for " % "|".join(AUTO_TRAITS), text):
                self.implemented.append(text)
        elif self.section in ("implementations", "required-methods", "provided-methods", "required-associated-consts",
                              "required-associated-types"):
            if identity.startswith(("method.", "tymethod.", "associatedconstant.", "associatedtype.")):
                self.methods.append(text)

    def lines(self):
        declaration = [line.rstrip() for line in self.declaration.splitlines() if line.strip()]
        return declaration + ["    " + line for line in sorted(self.methods) + sorted(self.implemented)]


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/doc") / "flexring"
    names = re.findall(r'<li><a href="([^"]+\.html)">([^<]+)</a>', (folder / "all.html").read_text())
    pages = {path: Page((folder / path).read_text()) for path, _ in names}
    modules = {str(path.relative_to(folder)): Page(path.read_text()) for path in folder.rglob("index.html")}
    failures = []

    listing = []
    for path, name in sorted(names, key=lambda item: item[1]):
        listing += [f"# {name}", *pages[path].lines(), ""]
    text = "\n".join(listing)
    if os.environ.get("FLEXRING_BLESS") == "1":
        LISTING.write_text(text)
    elif text != (known := LISTING.read_text() if LISTING.exists() else ""):
        difference = difflib.unified_diff(known.splitlines(), text.splitlines(), LISTING.name, "now", lineterm="", n=1)
        failures += [*difference, "the public API has changed: FLEXRING_BLESS=1 make doc writes tests/public_api.txt; see RELEASING.md"]

    if len(names) > MOST_ITEMS:
        failures.append(f"there are {len(names)} public items, more than {MOST_ITEMS}")
    for path, name in names:
        page = pages[path]
        own_module = str(pathlib.PurePath(path).parent / "index.html")
        near = [own_module] if own_module != "index.html" else []
        near += [os.path.normpath(pathlib.PurePath(path).parent / link.split("#")[0]) for link in page.links]
        if not page.has_example and not any((pages | modules).get(other, page).has_example for other in near):
            failures.append(f"{name} has no example, and links to no item with one")

    if failures:
        sys.exit("\n".join(failures))
    print(f"{len(names)} public items, each with an example or a link to one")


if __name__ == "__main__":
    main()
