//! docs/claims.md is written from [`claims`], so that no figure in it is copied by hand.

use std::fmt::Write;
use std::path::Path;

use zeroth_plan::{Claim, ClaimRange, CountedIn, claims};

const HEAD: &str = "\
# What people say about ZeRO, and where it holds

Sentences from five widely read descriptions of ZeRO, each held against the closed form: states only, once with
an fp32 master copy (2 + 2 + 12 bytes a parameter) and once without (2 + 2 + 8). \"From 21 GPUs\" is the smallest number
from which the sentence is true; \"never\" comes with the limit that is approached as GPUs are added.

Written from `crates/zeroth-plan/src/claims.rs`; a test fails when it is stale
(`ZEROTH_BLESS=1 cargo test -p zeroth-plan --test it claims_page::` writes it anew). Ψ is the number of parameters.

| claim | said in | with a master copy | without | what the arithmetic says |
|---|---|---|---|---|
";

fn holding(claim: &Claim, holding: &ClaimRange) -> String {
    let unit = match claim.counted_in {
        CountedIn::Gpus => "GPUs",
        CountedIn::MicroBatches => "micro-batches",
    };
    match holding.holds_from {
        Some(1) => "always".to_owned(),
        Some(count) => format!("from {count} {unit}"),
        None => format!("never; limit {}", holding.limit),
    }
}

fn page() -> String {
    let mut page = HEAD.to_owned();
    for claim in claims() {
        let (master, plain) = (holding(&claim, &claim.master), holding(&claim, &claim.plain));
        writeln!(page, "| {} | {} | {master} | {plain} | {} |", claim.claim, claim.source, claim.note)
            .expect("writing to a String cannot fail");
    }
    page
}

#[test]
fn docs_claims_md_is_written_from_the_claims() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/claims.md");
    let page = page();
    if std::env::var_os("ZEROTH_BLESS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == page,
        "docs/claims.md is stale: ZEROTH_BLESS=1 cargo test -p zeroth-plan --test it claims_page::"
    );
}
