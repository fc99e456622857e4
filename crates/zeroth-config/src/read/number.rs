//! Numbers that keep their text, so that integers are exact beyond 2^53.

/// A finite number and its text.
#[derive(Debug, Clone, PartialEq)]
pub struct Number {
    text: String,
    value: f64,
}

/// What a word is as a JSON number.
pub(super) enum JsonNumber {
    /// A number that an f64 can hold.
    Finite(Number),
    /// Written as JSON demands, but beyond the range of an f64.
    TooLarge,
    /// Not a JSON number.
    No,
}

impl Number {
    /// Reads a number that stands in text, such as `"8"`, `"1e-5"` or `" 2e8 "`: what Python's `float()` reads, less
    /// `inf`, `nan` and underscores. White space around it is dropped.
    pub fn from_text(text: &str) -> Option<Number> {
        let text = text.trim();
        // Rust reads the same forms as Python; what it reads beyond digits are words.
        if !text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E')) {
            return None;
        }
        let value: f64 = text.parse().ok()?;
        value.is_finite().then(|| Number { text: text.to_owned(), value })
    }

    /// Reads a number that is written as JSON demands.
    pub(super) fn from_json(word: &str) -> JsonNumber {
        if !is_json_number(word) {
            return JsonNumber::No;
        }
        Self::from_text(word).map_or(JsonNumber::TooLarge, JsonNumber::Finite)
    }

    /// The number as it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The nearest f64; always finite.
    pub fn as_f64(&self) -> f64 {
        self.value
    }

    /// The number if it is whole and fits an i64: `5e8`, `1.0` and `500000000` are whole, `0.5` is not. Computed from
    /// the digits, so that integers beyond 2^53 stay exact.
    pub fn as_whole(&self) -> Option<i64> {
        let (negative, unsigned) = match self.text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, self.text.strip_prefix('+').unwrap_or(&self.text)),
        };
        let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        // All digits as one integer times a power of ten, without zeros at either end.
        let fraction = fraction.trim_end_matches('0');
        let digits: String = [whole, fraction].concat();
        let significant = digits.trim_end_matches('0');
        let zeros = digits.len() - significant.len();
        let significant = significant.trim_start_matches('0');
        if significant.is_empty() {
            return Some(0);
        }
        // An exponent that no i64 holds moves every digit out of reach, in one direction or the other.
        let shift =
            exponent.parse::<i64>().ok()?.checked_sub(fraction.len() as i64)?.checked_add(zeros as i64)?;
        // 10^18 < 2^63 < 10^19: a larger shift cannot fit.
        let scale = 10_i128.checked_pow(u32::try_from(shift).ok().filter(|&shift| shift <= 18)?)?;
        let magnitude = significant.parse::<i128>().ok()?.checked_mul(scale)?;
        i64::try_from(if negative { -magnitude } else { magnitude }).ok()
    }
}

/// Whether a word is `-? (0 | [1-9][0-9]*) (. [0-9]+)? ([eE] [+-]? [0-9]+)?`.
fn is_json_number(word: &str) -> bool {
    fn digits(bytes: &[u8]) -> usize {
        bytes.iter().take_while(|byte| byte.is_ascii_digit()).count()
    }
    let mut rest = word.strip_prefix('-').unwrap_or(word).as_bytes();
    let whole = digits(rest);
    if whole == 0 || (whole > 1 && rest[0] == b'0') {
        return false;
    }
    rest = &rest[whole..];
    if let [b'.', fraction @ ..] = rest {
        let count = digits(fraction);
        if count == 0 {
            return false;
        }
        rest = &fraction[count..];
    }
    if let [b'e' | b'E', exponent @ ..] = rest {
        let exponent = if let [b'+' | b'-', after @ ..] = exponent { after } else { exponent };
        let count = digits(exponent);
        if count == 0 {
            return false;
        }
        rest = &exponent[count..];
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str) -> Option<i64> {
        Number::from_text(text).unwrap().as_whole()
    }

    #[test]
    fn whole_numbers_are_whole_however_they_are_written() {
        for (text, expected) in [
            ("500000000", 500_000_000),
            ("5e8", 500_000_000),
            ("5E+8", 500_000_000),
            ("0.5e9", 500_000_000),
            ("5000000000e-1", 500_000_000),
            ("1.0", 1),
            ("-1.50e1", -15),
            ("0", 0),
            ("-0.0", 0),
            ("0e99999999999999999999", 0),
            ("9007199254740993", 9_007_199_254_740_993), // 2^53 + 1: a float would say ...992
            ("9007199254740993.000", 9_007_199_254_740_993),
            ("9223372036854775807", i64::MAX),
            ("-9223372036854775808", i64::MIN),
            ("9.223372036854775807e18", i64::MAX),
            (" 2e8 ", 200_000_000),
            ("+8", 8),
            ("012", 12),
        ] {
            assert_eq!(whole(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn other_numbers_are_not() {
        for text in [
            "0.5",
            "15099494.4",
            "1e-5",
            "9223372036854775808",
            "-9223372036854775809",
            "1e19",
            "1e300",
            "5e-99999999999999999999",
            ".5",
            "100000000000000000000000000000000000000000000000",
        ] {
            assert_eq!(whole(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_no_finite_number_is_refused() {
        for text in
            ["", " ", "auto", "1e999", "-1e999", "inf", "nan", "0x10", "1_000", "8B", "1 2", "e5", "-", "."]
        {
            assert_eq!(Number::from_text(text), None, "{text}");
        }
    }

    #[test]
    fn the_text_stays_as_written() {
        let number = Number::from_text(" 2e8\n").unwrap();
        assert_eq!((number.text(), number.as_f64().to_bits()), ("2e8", 2e8_f64.to_bits()));
    }

    #[test]
    fn json_numbers_have_json_s_form() {
        for text in ["0", "-0", "10", "1.5", "1e5", "1E+05", "-0.0e-0"] {
            assert!(is_json_number(text), "{text}");
        }
        for text in
            ["", "-", "01", "-01", ".5", "5.", "1.e5", "1e", "1e+", "+1", "1x", "1 ", "0x1", "--1", "٣"]
        {
            assert!(!is_json_number(text), "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn every_i64_is_exact(value: i64, zeros in 0usize..30) {
            let number = Number::from_text(&format!("{value}.{}e0", "0".repeat(zeros + 1))).unwrap();
            proptest::prop_assert_eq!(number.as_whole(), Some(value));
        }

        #[test]
        fn a_moved_point_is_the_same_number(value in -999_999_999i64..=999_999_999, places in 0usize..9) {
            let text = format!("{}e-{places}", i128::from(value) * 10_i128.pow(places as u32));
            proptest::prop_assert_eq!(Number::from_text(&text).unwrap().as_whole(), Some(value));
        }
    }
}
