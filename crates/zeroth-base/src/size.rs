//! Sizes as people write them: `44GB`, `44GiB`, `2e8`, `500M`, `8B` parameters.
//!
//! GB is 10^9 and GiB is 2^30 everywhere, in what we read and in what we print.

/// A size that cannot be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum SizeError {
    #[error("`{0}` is not a size: write a number and a unit, as in {1}")]
    NotANumber(String, &'static str),
    #[error("`{text}` has the unit `{unit}`, which is not one of {known}")]
    Unit { text: String, unit: String, known: &'static str },
    #[error("`{0}` is {1}")]
    OutOfRange(String, &'static str),
}

const BYTE_UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("B", 1),
    ("K", 1_000),
    ("KB", 1_000),
    ("M", 1_000_000),
    ("MB", 1_000_000),
    ("G", 1_000_000_000),
    ("GB", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("TIB", 1 << 40),
];

const COUNT_UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("K", 1_000),
    ("M", 1_000_000),
    ("B", 1_000_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

/// Parses a number of bytes: `44GB`, `44GiB`, `2e8`, `500M`.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    parse(text, BYTE_UNITS, "44GB, 44GiB, 500M or 2e8", "K, M, G, T, KB, MB, GB, TB, KiB, MiB, GiB and TiB")
}

/// Parses a count, mostly of parameters: `8B`, `7.5B`, `500M`, `2e8`.
pub fn parse_count(text: &str) -> Result<u64, SizeError> {
    parse(text, COUNT_UNITS, "8B, 500M or 2e8", "K, M, B (or G) and T")
}

fn parse(
    text: &str,
    units: &[(&str, u64)],
    examples: &'static str,
    known: &'static str,
) -> Result<u64, SizeError> {
    let trimmed = text.trim();
    let (number, unit) = split_number(trimmed);
    let value: f64 = number.parse().map_err(|_| SizeError::NotANumber(text.to_owned(), examples))?;
    let unit = unit.trim();
    let Some((_, scale)) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) else {
        return Err(SizeError::Unit { text: text.to_owned(), unit: unit.to_owned(), known });
    };
    // A whole number without exponent is scaled in integers: 2^53 and above must stay exact.
    if let Ok(whole) = number.parse::<u64>() {
        return match whole.checked_mul(*scale) {
            Some(size) if i64::try_from(size).is_ok() => Ok(size),
            _ => Err(SizeError::OutOfRange(text.to_owned(), "larger than 2^63")),
        };
    }
    let scaled = value * *scale as f64;
    if value < 0.0 {
        Err(SizeError::OutOfRange(text.to_owned(), "negative"))
    } else if scaled >= i64::MAX as f64 {
        Err(SizeError::OutOfRange(text.to_owned(), "larger than 2^63"))
    } else if (scaled - scaled.round()).abs() > 1e-6 * scaled.clamp(1.0, 1e6) {
        Err(SizeError::OutOfRange(text.to_owned(), "not a whole number"))
    } else {
        Ok(scaled.round() as u64)
    }
}

/// Splits `7.5e9GB` into the longest leading number and the rest. `e` belongs to the number only with digits after it.
fn split_number(text: &str) -> (&str, &str) {
    let bytes = text.as_bytes();
    let digits = |mut at: usize| {
        while at < bytes.len() && bytes[at].is_ascii_digit() {
            at += 1;
        }
        at
    };
    let mut end = usize::from(matches!(bytes.first(), Some(b'-' | b'+')));
    end = digits(end);
    if bytes.get(end) == Some(&b'.') {
        end = digits(end + 1);
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'-' | b'+')));
        let exponent_end = digits(end + 1 + sign);
        if exponent_end > end + 1 + sign {
            end = exponent_end;
        }
    }
    text.split_at(end)
}

/// A human-readable number of bytes, in powers of ten: `44.8 GB`, `1.9 GB`, `120 GB`, `512 B`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    scaled(bytes, &UNITS).map_or_else(|| format!("{bytes} B"), |(value, unit)| format!("{value} {unit}"))
}

/// A human-readable number of parameters: `8.19B`, `596M`.
pub fn format_count(count: u64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")];
    scaled(count, &UNITS).map_or_else(|| count.to_string(), |(value, unit)| format!("{value}{unit}"))
}

/// An integer with thousands separators: `8,190,735,360`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count with its noun, given in the singular: `1 row`, `1,204 rows`.
pub fn counted(number: u64, one: &str) -> String {
    match number {
        1 => format!("1 {one}"),
        // micro-batches, processes
        _ if one.ends_with(['s', 'h']) => format!("{} {one}es", grouped(number)),
        _ => format!("{} {one}s", grouped(number)),
    }
}

/// The verb of a count: `1 row was`, `2 rows were`.
pub fn was(number: u64) -> &'static str {
    if number == 1 { "was" } else { "were" }
}

/// Three significant digits in the largest unit that the value reaches; whole values lose their zeros.
fn scaled(value: u64, units: &[(f64, &'static str)]) -> Option<(String, &'static str)> {
    let value = value as f64;
    // 999.6 kB reads as 1000 kB in three digits: such a value belongs to the next unit.
    let (scale, unit) = units.iter().find(|(scale, _)| value >= scale * 0.9995)?;
    let number = value / scale;
    let decimals = if number >= 99.95 {
        0
    } else if number >= 9.995 {
        1
    } else {
        2
    };
    let text = format!("{number:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    Some((text.to_owned(), *unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_parsed_in_decimal_and_binary_units() {
        for (text, bytes) in [
            ("44GB", 44_000_000_000),
            ("44GiB", 44 << 30),
            ("44 gib", 44 << 30),
            ("2e8", 200_000_000),
            ("500M", 500_000_000),
            ("1.5GiB", 3 << 29),
            ("0", 0),
            ("9007199254740993", 9_007_199_254_740_993), // 2^53 + 1: no rounding through a float
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn nouns_are_singular_for_one_only() {
        assert_eq!([0, 1, 2].map(was), ["were", "was", "were"]);
        let found =
            [(0, "row"), (1, "row"), (2, "row"), (1204, "token"), (1, "micro-batch"), (2, "micro-batch")]
                .map(|(number, one)| counted(number, one));
        assert_eq!(found, ["0 rows", "1 row", "2 rows", "1,204 tokens", "1 micro-batch", "2 micro-batches"]);
    }

    #[test]
    fn b_means_billions_in_counts() {
        assert_eq!(parse_count("8B"), Ok(8_000_000_000));
        assert_eq!(parse_count("7.5B"), Ok(7_500_000_000));
        assert_eq!(parse_count("0.6b"), Ok(600_000_000));
        assert_eq!(parse_count("2851598336"), Ok(2_851_598_336));
    }

    #[test]
    fn errors_name_the_problem_of_a_size() {
        for (text, part) in [
            ("", "not a size"),
            ("abc", "not a size"),
            ("-1GB", "negative"),
            ("44GX", "unit `GX`"),
            ("0.5", "not a whole number"),
            ("1e999", "larger than 2^63"),
            ("99999999TB", "larger than 2^63"),
        ] {
            let message = parse_bytes(text).unwrap_err().to_string();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn formatted_sizes_have_three_significant_digits() {
        for (bytes, text) in [
            (120_000_000_000, "120 GB"),
            (31_406_250_000, "31.4 GB"),
            (1_875_000_000, "1.88 GB"),
            (999_600, "1 MB"),
            (512, "512 B"),
            (0, "0 B"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
        assert_eq!(format_count(8_190_735_360), "8.19B");
        assert_eq!(format_count(596_049_920), "596M");
    }

    #[test]
    fn digits_are_grouped_in_threes() {
        for (number, text) in [(0, "0"), (100, "100"), (1_048_576, "1,048,576"), (500_000_000, "500,000,000")]
        {
            assert_eq!(grouped(number), text);
        }
    }

    proptest::proptest! {
        #[test]
        fn parsing_never_panics(text in ".*") {
            let _ = parse_bytes(&text);
            let _ = parse_count(&text);
        }

        #[test]
        fn integers_parse_back(count in 0u64..=i64::MAX as u64) {
            proptest::prop_assert_eq!(parse_count(&count.to_string()), Ok(count));
        }
    }
}
