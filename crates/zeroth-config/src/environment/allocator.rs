//! `PYTORCH_ALLOC_CONF`: options of an allocator that searches and splits, where memory here is planned.

use std::fmt::Write;

use zeroth_base::nearest;

/// The options: name, what it asks of PyTorch, what is so here.
const OPTIONS: [(&str, &str, &str); 8] = [
    (
        "max_split_size_mb",
        "never splits blocks larger than this, against fragmentation",
        "every buffer has a planned place in one arena, so nothing is split and nothing fragments",
    ),
    (
        "garbage_collection_threshold",
        "gives cached blocks back once this share of the memory is in use",
        "nothing is cached and given back: the arena's size is the planned peak",
    ),
    (
        "expandable_segments",
        "lets segments grow in place, against fragmentation",
        "the arena is taken once and never grows",
    ),
    (
        "roundup_power2_divisions",
        "rounds sizes up so that blocks are found again",
        "no block is searched for: offsets are fixed before the first step",
    ),
    (
        "backend",
        "chooses between PyTorch's allocator and CUDA's",
        "neither is used: there is one allocation for each tier",
    ),
    (
        "pinned_use_cuda_host_register",
        "locks host memory by registering it",
        "host memory for a GPU is allocated locked, not registered",
    ),
    (
        "pinned_num_register_threads",
        "locks host memory with this many threads",
        "host memory for a GPU is allocated locked, once, before the first step",
    ),
    (
        "release_lock_on_cudamalloc",
        "lets other threads go on while the driver allocates",
        "a step allocates nothing, so there is nobody to wait",
    ),
];

/// The options of a value, each with what is so here.
pub(super) fn explain(value: &str) -> String {
    let mut text = String::new();
    for option in split(value) {
        let (name, setting) = option.split_once(':').map_or((option, ""), |(name, setting)| (name, setting));
        let (name, setting) = (name.trim(), setting.trim());
        let known = OPTIONS.iter().find(|(known, ..)| *known == name);
        // Writing to a String cannot fail.
        let _ = match (known, nearest(name, OPTIONS.iter().map(|(known, ..)| *known))) {
            (Some((.., here)), _) => write!(text, "; {name} {setting}: {here}"),
            (None, Some(near)) => write!(text, "; {name}: no such option, did you mean `{near}`?"),
            (None, None) => write!(text, "; {name}: not an option that is known here"),
        };
    }
    text
}

/// Options are parted by commas, which lists in brackets have as well.
fn split(value: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    let parts = value.split(|c| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty()).collect()
}

/// The options for the page.
pub(super) fn section() -> String {
    let mut text =
        "## Options of PYTORCH_ALLOC_CONF\n\n| option | what it asks of PyTorch | here |\n|---|---|---|\n"
            .to_owned();
    for (name, asks, here) in OPTIONS {
        let _ = writeln!(text, "| `{name}` | {asks} | {here} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_is_explained() {
        let text =
            explain("max_split_size_mb:128, garbage_collection_threshold:0.9,expandable_segments:True");
        for part in
            ["max_split_size_mb 128: ", "garbage_collection_threshold 0.9: ", "expandable_segments True: "]
        {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(explain(""), "");
    }

    #[test]
    fn commas_in_brackets_part_nothing() {
        let value = "roundup_power2_divisions:[256:1,512:2,>:8],backend:native";
        assert_eq!(split(value), ["roundup_power2_divisions:[256:1,512:2,>:8]", "backend:native"]);
    }

    #[test]
    fn a_slip_gets_the_nearest_option() {
        assert!(explain("max_split_size:128").contains("did you mean `max_split_size_mb`?"));
        assert!(explain("x").contains("not an option"));
    }
}
