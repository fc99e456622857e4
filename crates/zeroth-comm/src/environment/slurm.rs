//! What SLURM says of hosts: lists of nodes such as `n[1-3,7],gpu01`, and tasks per node such as `2(x2),1`.

use super::LauncherError;
use crate::place::{MOST_HOSTS, MOST_NAME};

/// The most brackets in one name: slurm.conf allows a few dimensions.
const MOST_BRACKETS: usize = 4;

/// The names of a list of nodes, in order.
pub(super) fn nodes(list: &str) -> Result<Vec<String>, LauncherError> {
    let wrong = |why: &'static str| LauncherError::NodeList { list: shown(list), why };
    let mut names = Vec::new();
    for item in split_outside_brackets(list) {
        let expanded = expand(item.trim()).map_err(wrong)?;
        if names.len() + expanded.len() > MOST_HOSTS {
            return Err(wrong("it has too many names"));
        }
        names.extend(expanded);
    }
    if names.iter().any(|name| crate::place::check_name(name).is_err()) {
        return Err(wrong("a name is empty, too long or not printable"));
    }
    Ok(names)
}

/// The tasks of every node.
pub(super) fn tasks(text: &str) -> Result<Vec<usize>, LauncherError> {
    let wrong = |why: &'static str| LauncherError::TasksPerNode { text: shown(text), why };
    let number = |text: &str| match text.parse::<usize>() {
        Ok(number @ 1..=1_000_000) => Ok(number),
        _ => Err(wrong("a number is not between 1 and 1,000,000")),
    };
    let mut tasks = Vec::new();
    for item in text.trim().split(',') {
        let (count, times) = match item.split_once("(x") {
            None => (number(item)?, 1),
            Some((count, times)) => {
                let times = times.strip_suffix(')').ok_or_else(|| wrong("a parenthesis is not closed"))?;
                (number(count)?, number(times)?)
            }
        };
        if times > MOST_HOSTS - tasks.len() {
            return Err(wrong("it has too many nodes"));
        }
        tasks.extend(std::iter::repeat_n(count, times));
    }
    Ok(tasks)
}

fn shown(text: &str) -> String {
    text.chars().take(200).collect()
}

fn split_outside_brackets(list: &str) -> impl Iterator<Item = &str> {
    let mut is_inside = false;
    list.split(move |letter| {
        match letter {
            '[' => is_inside = true,
            ']' => is_inside = false,
            _ => {}
        }
        letter == ',' && !is_inside
    })
}

/// The names of one item: text with ranges in brackets.
fn expand(item: &str) -> Result<Vec<String>, &'static str> {
    let mut names = vec![String::new()];
    let mut rest = item;
    for brackets in 0.. {
        let Some((before, behind)) = rest.split_once('[') else { break };
        let (ranges, after) = behind.split_once(']').ok_or("a bracket is not closed")?;
        if brackets == MOST_BRACKETS || before.contains(']') {
            return Err("its brackets are not those of a list of nodes");
        }
        let numbers = numbers(ranges)?;
        if names.len().saturating_mul(numbers.len()) > MOST_HOSTS {
            return Err("it has too many names");
        }
        names = names
            .iter()
            .flat_map(|name| numbers.iter().map(move |number| format!("{name}{before}{number}")))
            .collect();
        if names.iter().any(|name| name.len() > MOST_NAME) {
            return Err("a name is too long");
        }
        rest = after;
    }
    if rest.contains(']') || rest.len() > MOST_NAME {
        return Err("its brackets are not those of a list of nodes");
    }
    Ok(names.into_iter().map(|name| name + rest).collect())
}

/// The numbers in a bracket, with their leading zeros.
fn numbers(ranges: &str) -> Result<Vec<String>, &'static str> {
    let parse = |text: &str| -> Result<usize, &'static str> {
        let is_number = (1..=9).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| is_number).ok_or("a range does not consist of numbers")
    };
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (parse(from)?, parse(to)?);
        if last < first {
            return Err("a range ends before it begins");
        }
        if last - first >= MOST_HOSTS - numbers.len() {
            return Err("it has too many names");
        }
        numbers.extend((first..=last).map(|number| format!("{number:0width$}", width = from.len())));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_expanded_as_scontrol_does() {
        for (list, expected) in [
            ("n1", &["n1"][..]),
            ("n[1-3,7],gpu01", &["n1", "n2", "n3", "n7", "gpu01"]),
            ("n[08-11]", &["n08", "n09", "n10", "n11"]),
            ("r[1-2]n[1-2]-ib", &["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
            ("a,b,c.example.org", &["a", "b", "c.example.org"]),
            ("n[9-10]", &["n9", "n10"]),
            ("n[7]", &["n7"]),
        ] {
            assert_eq!(nodes(list).as_deref(), Ok(expected.map_owned().as_slice()), "{list}");
        }
    }

    trait MapOwned {
        fn map_owned(&self) -> Vec<String>;
    }

    impl MapOwned for [&str] {
        fn map_owned(&self) -> Vec<String> {
            self.iter().map(|text| (*text).to_owned()).collect()
        }
    }

    #[test]
    fn lists_that_are_none_or_without_end_are_refused() {
        let long = format!("n{}", "x".repeat(300));
        for list in [
            "",
            "n[1",
            "n]1[",
            "n[1-2]]",
            "n[2-1]",
            "n[a-b]",
            "n[]",
            "n[1-999999999]",
            "n[1-9999999999999999999]",
            "a[1-100]b[1-100]",
            "a[1]b[1]c[1]d[1]e[1]",
            "a,,b",
            "n[1-4096],m",
            long.as_str(),
        ] {
            assert!(matches!(nodes(list), Err(LauncherError::NodeList { .. })), "{list}");
        }
        assert_eq!(nodes("n[1-4096]").unwrap().len(), 4096);
    }

    #[test]
    fn tasks_per_node_are_expanded() {
        for (text, expected) in
            [("2(x2),1", &[2, 2, 1][..]), ("2,1", &[2, 1]), ("8(x3)", &[8, 8, 8]), ("4", &[4])]
        {
            assert_eq!(tasks(text).as_deref(), Ok(expected), "{text}");
        }
        for text in ["", "0", "2(x", "2(x0)", "2(x2", "x", "2,", "1(x4097)", "-1", "2(x99999999999)"] {
            assert!(matches!(tasks(text), Err(LauncherError::TasksPerNode { .. })), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_more_than_the_most(list in "[an0-9,\\[\\]()x-]{0,60}") {
            if let Ok(names) = nodes(&list) {
                proptest::prop_assert!(names.len() <= MOST_HOSTS);
            }
            if let Ok(tasks) = tasks(&list) {
                proptest::prop_assert!(tasks.len() <= MOST_HOSTS);
            }
        }
    }
}
