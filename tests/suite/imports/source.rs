//! The module trees of all crates and the paths by which their modules name each other.
//!
//! Owns parsing and name resolution: `use` declarations, inline paths such as `crate::device::x()`, paths
//! inside macro calls, and re-exports, which are followed to the module that defines the item. Types that are
//! only inferred, and methods found through a type, are not imports.

use proc_macro2::{TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};

/// The segments of a module's path. Those of the library begin with a module of `lib.rs`, others with their
/// crate.
pub type ModulePath = Vec<String>;

/// The library's crate, as others name it.
const LIBRARY: &str = "flexring";
/// The crate whose code is all for tests.
const TESTKIT: &str = "flexring_testkit";
/// How many re-exports are followed for one name, so that a loop of globs ends.
const MAX_REEXPORTS: usize = 16;

/// A type that a module defines.
pub struct TypeDefinition {
    pub name: String,
    pub file: PathBuf,
    pub line: usize,
}

/// A module that names an item of another one.
pub struct Import {
    pub from: ModulePath,
    pub to: ModulePath,
    pub file: PathBuf,
    pub line: usize,
    /// The path as it is written.
    pub text: String,
    /// The import is a `pub use` of any visibility.
    pub reexport: bool,
    /// The import is in code for tests.
    pub test: bool,
}

#[derive(Default)]
struct Module {
    file: PathBuf,
    /// The module is a file of its own, not a block in its parent's file.
    has_file: bool,
    test: bool,
    children: BTreeSet<String>,
    items: BTreeSet<String>,
    /// What `use` declarations bind, by name.
    bindings: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
}

/// A path in the code of a module, not yet resolved.
struct Mention {
    scope: ModulePath,
    segments: Vec<String>,
    line: usize,
    reexport: bool,
    test: bool,
}

/// All modules of all crates.
#[derive(Default)]
pub struct Source {
    /// The crates besides the library.
    crates: BTreeSet<String>,
    modules: BTreeMap<ModulePath, Module>,
    mentions: Vec<Mention>,
    types: Vec<TypeDefinition>,
}

impl Source {
    /// Parses `src/lib.rs`, the crates under `crates/`, and every module that they declare.
    pub fn parse(root: &Path) -> Self {
        let mut source = Self::default();
        source.add_file(root, Path::new("src/lib.rs"), Vec::new(), false);
        let mut add = |name: String, file: &Path| {
            if root.join(file).exists() {
                source.crates.insert(name.clone());
                let test = name == TESTKIT;
                source.add_file(root, file, vec![name], test);
            }
        };
        for folder in std::fs::read_dir(root.join("crates")).into_iter().flatten() {
            let name = folder.expect("a folder").file_name().into_string().expect("the name of a crate");
            let sources = Path::new("crates").join(&name).join("src");
            for file in ["lib.rs", "main.rs"] {
                add(name.replace('-', "_"), &sources.join(file));
            }
        }
        source
    }

    /// The modules of the library's root, without those for tests.
    pub fn top_level(&self) -> Vec<&str> {
        let children = self.modules[&Vec::new()].children.iter().map(String::as_str);
        children.filter(|name| !self.modules[&vec![(*name).to_owned()]].test).collect()
    }

    /// The struct, enum and trait definitions outside of tests and function bodies.
    pub fn types(&self) -> &[TypeDefinition] {
        &self.types
    }

    /// Every import that leaves its file. Modules without a file of their own count as their file.
    pub fn imports(&self) -> Vec<Import> {
        let import = |mention: &Mention| {
            let (to, _) = self.resolve(&mention.scope, &mention.segments, MAX_REEXPORTS)?;
            let (from, to) = (self.file_module(&mention.scope), self.file_module(&to));
            (from != to).then(|| Import {
                file: self.modules[&from].file.clone(),
                from,
                to,
                line: mention.line,
                text: mention.segments.join("::"),
                reexport: mention.reexport,
                test: mention.test,
            })
        };
        self.mentions.iter().filter_map(import).collect()
    }

    /// Whether files are declared in this module, so that its own file is a `mod.rs`, or stands beside a
    /// folder.
    pub fn is_folder(&self, path: &[String]) -> bool {
        let child = |name: &String| self.modules.get(&[path, std::slice::from_ref(name)].concat());
        let children = self.modules[path].children.iter().filter_map(child);
        path.is_empty() || children.into_iter().any(|child| child.has_file && !child.test)
    }

    fn add_file(&mut self, root: &Path, file: &Path, path: ModulePath, test: bool) {
        let text = std::fs::read_to_string(root.join(file))
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
        let parsed =
            syn::parse_file(&text).unwrap_or_else(|error| panic!("cannot parse {}: {error}", file.display()));
        self.modules.insert(
            path.clone(),
            Module { file: file.to_owned(), has_file: true, test, ..Module::default() },
        );
        let mut reader = Reader { source: self, root, file, scope: path, test, in_body: false };
        reader.visit_file(&parsed);
    }

    /// The module of the file that this module is in.
    fn file_module(&self, path: &[String]) -> ModulePath {
        let mut path = path.to_vec();
        while !self.modules[&path].has_file {
            path.pop();
        }
        path
    }

    /// The module that a path leads to, and whether all segments were modules. `None` for paths to other
    /// crates, local names and the prelude.
    fn resolve(&self, scope: &[String], segments: &[String], left: usize) -> Option<(ModulePath, bool)> {
        let module = &self.modules[scope];
        let own = scope.first().filter(|name| self.crates.contains(*name));
        let (first, rest) = segments.split_first()?;
        let start = match first.as_str() {
            "crate" => own.into_iter().cloned().collect(),
            "self" => scope.to_vec(),
            "super" => scope.split_last()?.1.to_vec(),
            LIBRARY if own.is_some() => Vec::new(),
            name if self.crates.contains(name) => vec![name.to_owned()],
            name if module.children.contains(name) => [scope, &[name.to_owned()]].concat(),
            name => {
                let target = module.bindings.get(name).filter(|target| *target != segments)?;
                let target = [target, rest].concat();
                return self.resolve(scope, &target, left.checked_sub(1)?);
            }
        };
        self.descend(start, rest, left)
    }

    fn descend(&self, mut path: ModulePath, rest: &[String], left: usize) -> Option<(ModulePath, bool)> {
        for (at, name) in rest.iter().enumerate() {
            let module = self.modules.get(&path)?;
            if name == "super" {
                path.pop()?;
            } else if module.children.contains(name) {
                path.push(name.clone());
            } else if module.items.contains(name) {
                return Some((path, false));
            } else {
                let through = self.reexported(&path, &rest[at..], left);
                return through.or(Some((path, false)));
            }
        }
        Some((path, true))
    }

    /// What a module's `use` declarations make of a path that begins with neither an item nor a child of it.
    fn reexported(&self, path: &ModulePath, rest: &[String], left: usize) -> Option<(ModulePath, bool)> {
        let left = left.checked_sub(1)?;
        let module = &self.modules[path];
        if let Some(target) = module.bindings.get(&rest[0]) {
            return self.resolve(path, &[target, &rest[1..]].concat(), left);
        }
        module.globs.iter().find_map(|glob| {
            let (target, true) = self.resolve(path, glob, left)? else { return None };
            let there = &self.modules[&target];
            if there.children.contains(&rest[0]) || there.items.contains(&rest[0]) {
                return self.descend(target, rest, left);
            }
            self.reexported(&target, rest, left)
        })
    }
}

/// Collects the modules, items and paths of one file.
struct Reader<'a> {
    source: &'a mut Source,
    root: &'a Path,
    file: &'a Path,
    /// The module that the current item is in.
    scope: ModulePath,
    test: bool,
    /// The current item is in a function.
    in_body: bool,
}

impl Reader<'_> {
    fn module(&mut self) -> &mut Module {
        self.source.modules.get_mut(&self.scope).expect("a module is added before it is read")
    }

    fn item(&mut self, ident: &syn::Ident) {
        if !self.in_body {
            self.module().items.insert(ident.to_string());
        }
    }

    fn type_definition(&mut self, ident: &syn::Ident) {
        self.item(ident);
        if !self.test && !self.in_body {
            let (name, line) = (ident.to_string(), ident.span().start().line);
            self.source.types.push(TypeDefinition { name, file: self.file.to_owned(), line });
        }
    }

    fn mention(&mut self, segments: Vec<String>, line: usize, reexport: bool) {
        let (scope, test) = (self.scope.clone(), self.test);
        self.source.mentions.push(Mention { scope, segments, line, reexport, test });
    }

    fn use_tree(&mut self, prefix: &[String], tree: &syn::UseTree, reexport: bool) {
        let with = |ident: &syn::Ident| [prefix, &[ident.to_string()]].concat();
        // `use a::b::{self}` names b.
        let named = |ident: &syn::Ident| if ident == "self" { prefix.to_vec() } else { with(ident) };
        let (path, name, line) = match tree {
            syn::UseTree::Path(path) => return self.use_tree(&with(&path.ident), &path.tree, reexport),
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.use_tree(prefix, tree, reexport));
            }
            syn::UseTree::Glob(glob) => {
                self.module().globs.push(prefix.to_vec());
                let line = glob.star_token.spans[0].start().line;
                return self.mention(prefix.to_vec(), line, reexport);
            }
            syn::UseTree::Name(name) => (named(&name.ident), None, name.ident.span().start().line),
            syn::UseTree::Rename(name) => {
                (named(&name.ident), Some(name.rename.to_string()), name.ident.span().start().line)
            }
        };
        if let Some(name) = name.or_else(|| path.last().cloned()) {
            self.module().bindings.insert(name, path.clone());
        }
        self.mention(path, line, reexport);
    }

    /// The paths in the tokens of a macro call, which are not parsed.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let (mut colons, mut line) = (0, 0);
        for token in tokens {
            match &token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.end_of_path(&mut path, line);
                        line = ident.span().start().line;
                    }
                    path.push(ident.to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Group(group) => self.tokens(group.stream()),
                _ => {}
            }
            self.end_of_path(&mut path, line);
            colons = 0;
        }
        self.end_of_path(&mut path, line);
    }

    fn end_of_path(&mut self, path: &mut Vec<String>, line: usize) {
        let path = std::mem::take(path);
        if path.len() > 1 {
            self.mention(path, line, false);
        }
    }

    /// The file of a module declared in the current scope.
    fn child_file(&self, name: &str, attributes: &[syn::Attribute]) -> PathBuf {
        let folder = self.file.parent().unwrap_or(Path::new(""));
        if let Some(path) = attributes.iter().find_map(path_attribute) {
            return normalized(&folder.join(path));
        }
        let stem = self.file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let folder =
            if ["lib", "main", "mod"].contains(&stem) { folder.to_owned() } else { folder.join(stem) };
        let own = self.source.file_module(&self.scope).len();
        let folder = self.scope[own..].iter().fold(folder, |folder, inline| folder.join(inline));
        let (flat, nested) = (folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs"));
        if self.root.join(&flat).exists() { flat } else { nested }
    }

    fn in_test<R>(&mut self, attributes: &[syn::Attribute], read: impl FnOnce(&mut Self) -> R) -> R {
        let outer = self.test;
        self.test |= attributes.iter().any(is_test);
        let result = read(self);
        self.test = outer;
        result
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        self.in_test(attributes(item), |reader| visit::visit_item(reader, item));
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let name = item.ident.to_string();
        let path = [&self.scope[..], std::slice::from_ref(&name)].concat();
        self.module().children.insert(name.clone());
        if let Some((_, items)) = &item.content {
            let module = Module { file: self.file.to_owned(), test: self.test, ..Module::default() };
            self.source.modules.entry(path.clone()).or_insert(module);
            let outer = std::mem::replace(&mut self.scope, path);
            items.iter().for_each(|item| self.visit_item(item));
            self.scope = outer;
        } else if !self.source.modules.contains_key(&path) {
            let file = self.child_file(&name, &item.attrs);
            let (root, test) = (self.root, self.test);
            self.source.add_file(root, &file, path, test);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let reexport = !matches!(item.vis, syn::Visibility::Inherited);
        self.use_tree(&[], &item.tree, reexport);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.item(&item.sig.ident);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.in_test(&item.attrs, |reader| visit::visit_impl_item_fn(reader, item));
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let outer = std::mem::replace(&mut self.in_body, true);
        visit::visit_block(self, block);
        self.in_body = outer;
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.type_definition(&item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.type_definition(&item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.type_definition(&item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.item(&item.ident);
        visit::visit_item_type(self, item);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.item(&item.ident);
        visit::visit_item_union(self, item);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.item(&item.ident);
        visit::visit_item_const(self, item);
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.item(&item.ident);
        visit::visit_item_static(self, item);
    }

    fn visit_item_macro(&mut self, item: &'ast syn::ItemMacro) {
        if let Some(ident) = &item.ident {
            self.item(ident);
        }
        visit::visit_item_macro(self, item);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.visit_path(&called.path);
        self.tokens(called.tokens.clone());
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let segments = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            let line = path.segments[0].ident.span().start().line;
            self.mention(segments, line, false);
        }
        visit::visit_path(self, path);
    }

    // The paths in `pub(in a::b)` and in attributes import nothing.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}

/// `#[cfg(test)]`, also among other conditions, but not `#[cfg(not(test))]`.
fn is_test(attribute: &syn::Attribute) -> bool {
    let syn::Meta::List(list) = &attribute.meta else { return false };
    let condition = list.tokens.to_string();
    let mut names =
        condition.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|name| !name.is_empty());
    let mut previous = "";
    list.path.is_ident("cfg")
        && names.any(|name| {
            let negated = std::mem::replace(&mut previous, name) == "not";
            name == "test" && !negated
        })
}

/// The file of `#[path = "file"]`.
fn path_attribute(attribute: &syn::Attribute) -> Option<String> {
    let syn::Meta::NameValue(meta) = &attribute.meta else { return None };
    let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &meta.value else { return None };
    meta.path.is_ident("path").then(|| text.value())
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// A path without `..`.
fn normalized(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts
}
