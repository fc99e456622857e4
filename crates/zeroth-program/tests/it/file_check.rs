//! Checks of program dumps in the manner of LLVM's FileCheck.

/// Checks a dump against patterns, one per line:
///
/// - `CHECK: text` is found in this or a later line than the match before it;
/// - `NEXT: text` is found in the line right after the match before it;
/// - `NOT: text` is found in no line between the matches before and after it.
///
/// `{{*}}` in a text matches anything within the line. Lines without a directive are comments.
pub(crate) fn file_check(dump: &str, patterns: &str) {
    let lines: Vec<&str> = dump.lines().collect();
    let mut at = 0;
    let mut excluded: Vec<&str> = Vec::new();
    for pattern in patterns.lines().map(str::trim) {
        if let Some(text) = pattern.strip_prefix("NOT: ") {
            excluded.push(text);
        } else if let Some(text) = pattern.strip_prefix("NEXT: ") {
            let found = lines.get(at).is_some_and(|line| matches(line, text));
            assert!(found, "line {}: `{text}` is not next: {:?}\n{dump}", at + 1, lines.get(at));
            at += 1;
        } else if let Some(text) = pattern.strip_prefix("CHECK: ") {
            let found = lines[at..].iter().position(|line| matches(line, text));
            let found = found.unwrap_or_else(|| panic!("no `{text}` after line {at}\n{dump}"));
            exclude(&lines[at..at + found], &mut excluded, dump);
            at += found + 1;
        }
    }
    exclude(&lines[at..], &mut excluded, dump);
}

fn exclude(lines: &[&str], excluded: &mut Vec<&str>, dump: &str) {
    for text in excluded.drain(..) {
        let found = lines.iter().find(|line| matches(line, text));
        assert!(found.is_none(), "`{text}` is excluded: {found:?}\n{dump}");
    }
}

/// Whether the parts between wildcards occur in order.
fn matches(line: &str, text: &str) -> bool {
    let mut rest = line;
    text.split("{{*}}").all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}
