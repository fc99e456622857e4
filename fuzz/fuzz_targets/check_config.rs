//! Any bytes as a config, all the way: read, checked, and, where the check finds no error, resolved.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zeroth_config::check::check;
use zeroth_config::read::{ConfigSource, parse};
use zeroth_config::resolve::{Flags, ModelFacts, ResolveRequest, resolve};
use zeroth_config::snippet;

fuzz_target!(|bytes: &[u8]| {
    let Ok(document) = ConfigSource::from_bytes("fuzz", bytes.to_vec()).and_then(parse) else { return };
    let report = check(&document);
    for verdict in &report.verdicts {
        assert!(verdict.span.end <= document.source.text().len());
        let shown = snippet::of_verdict("error", &document.source, verdict);
        assert!(shown.contains("fuzz: line "), "{shown}");
    }
    if !report.is_ok(false) {
        return;
    }
    let flags = Flags::default();
    let model = Some(ModelFacts { hidden_size: Some(4096), blocks: Some(32) });
    for ranks in [1, 5, 1024] {
        let request = ResolveRequest { file: &report.values, flags: &flags, ranks, model, steps: Some(100) };
        let Ok(resolved) = resolve(&request) else { continue };
        // What was resolved is a config without errors itself.
        let text = resolved.to_json().to_string();
        let again = check(&parse(ConfigSource::from_text("resolved", text.clone())).expect("it is JSON"));
        assert!(again.is_ok(false), "{text}\n{:?}", again.verdicts.iter().find(|v| v.status.word() == "invalid"));
    }
});
