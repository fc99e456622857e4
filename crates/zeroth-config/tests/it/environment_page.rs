//! `docs/environment.md` is generated from the table of variables.

use std::path::Path;

use zeroth_config::environment;

#[test]
fn docs_environment_md_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/environment.md");
    let page = environment::page();
    if std::env::var_os("ZEROTH_BLESS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/environment.md is stale: ZEROTH_BLESS=1 cargo test -p zeroth-config --test it environment_page:: writes it anew"
    );
}

#[test]
fn every_variable_is_listed_once() {
    let page = environment::page();
    for variable in environment::variables() {
        let row = format!("\n| `{}` | ", variable.name);
        assert_eq!(page.matches(&row).count(), 1, "{}", variable.name);
    }
}
