//! Did-you-mean suggestions: the known name nearest to a typed one.

/// The candidate that `typed` most likely meant, if any is near enough.
///
/// Near enough is an edit distance (insert, delete, replace, swap of neighbours; case and `-`/`_` do not count)
/// of at most a third of the typed name's length, and at most 4. Ties go to the candidate that comes first.
pub fn nearest<'a>(typed: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let typed = fold(typed);
    let limit = (typed.len() / 3).clamp(1, 4);
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let folded = fold(candidate);
        // The distance is at least the difference of the lengths: most candidates end here.
        if folded.len().abs_diff(typed.len()) > limit {
            continue;
        }
        let distance = edit_distance(&typed, &folded);
        if distance <= limit && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

fn fold(name: &str) -> Vec<char> {
    name.chars().map(|c| if c == '-' { '_' } else { c.to_ascii_lowercase() }).collect()
}

/// Optimal string alignment distance: Levenshtein's with swaps of neighbours.
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let mut before_last = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    let mut row = vec![0; b.len() + 1];
    for i in 1..=a.len() {
        row[0] = i;
        for j in 1..=b.len() {
            let replace = last[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replace.min(last[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before_last[j - 2] + 1);
            }
        }
        std::mem::swap(&mut before_last, &mut last);
        std::mem::swap(&mut last, &mut row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distance(a: &str, b: &str) -> usize {
        edit_distance(&fold(a), &fold(b))
    }

    #[test]
    fn distances_match_the_textbook() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("treu", "true"), 1, "a swap of neighbours is one edit");
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("overlap-comm", "overlap_comm"), 0);
    }

    #[test]
    fn typos_find_their_key_and_unrelated_names_do_not() {
        let keys = ["gradient_clipping", "stage3_prefetch_bucket_size", "steps_per_print"];
        assert_eq!(nearest("gradient_cliping", keys), Some("gradient_clipping"));
        assert_eq!(nearest("stage3_prefetch_bucketsize", keys), Some("stage3_prefetch_bucket_size"));
        assert_eq!(nearest("my_own_notes", keys), None);
        assert_eq!(nearest("", keys), None);
    }
}
