//! Limits of one row, in every format. They bound its memory, whatever a few compressed bytes expand to.

/// The largest row, in bytes of its text.
pub(super) const MAX_ROW_BYTES: u64 = 64 << 20;

/// The most values of a row: entries of lists, fields and cells. A parsed one takes about 150 bytes.
pub(super) const MAX_ROW_VALUES: u64 = 4 << 20;

/// The longest text that is tokenised, and the most text that all threads tokenise at a time. The tokenizers crate takes up to
/// 200 bytes for each.
pub(super) const MAX_TEXT_BYTES: usize = 8 << 20;

/// Whether JSON may have more values than a row: all but the first of a list or an object follow a delimiter.
pub(super) fn has_too_many_values(json: &[u8]) -> bool {
    if json.len() as u64 <= MAX_ROW_VALUES {
        return false;
    }
    let (mut delimiters, mut in_string, mut is_escaped) = (0_u64, false, false);
    for byte in json {
        if in_string {
            in_string = is_escaped || *byte != b'"';
            is_escaped = !is_escaped && *byte == b'\\';
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b',' | b':' | b'[' | b'{' => delimiters += 1,
            _ => {}
        }
    }
    delimiters > MAX_ROW_VALUES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_strings() {
        let most = MAX_ROW_VALUES as usize;
        let list = |values: usize| format!("[{}1]", "1,".repeat(values - 1));
        assert!(!has_too_many_values(list(most).as_bytes()));
        assert!(has_too_many_values(list(most + 1).as_bytes()));
        let text = format!("{{\"text\": \"{}\\\"{}\"}}", ",".repeat(most), ",".repeat(most));
        assert!(!has_too_many_values(text.as_bytes()));
    }
}
