//! The date that a chat template sees, formatted as Python does.

use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

/// The date that `strftime_now` returns, at midnight.
///
/// It is an explicit input, so that a run resumed the next day has the same tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Date {
    year: i64,
    month: u8,
    of_month: u8,
}

/// An invalid date.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{found}` is not a date: expected year-month-day, as in 2024-07-26")]
pub struct DateError {
    /// The text that is not a date.
    found: String,
}

impl FromStr for Date {
    type Err = DateError;

    fn from_str(text: &str) -> Result<Self, DateError> {
        let read = || {
            let mut parts = text.splitn(3, '-');
            let date = Self {
                year: parts.next()?.parse().ok()?,
                month: parts.next()?.parse().ok()?,
                of_month: parts.next()?.parse().ok()?,
            };
            // A date that does not exist does not round-trip through the calendar.
            let real =
                (1..=9999).contains(&date.year) && (1..=12).contains(&date.month) && date.of_month >= 1;
            (real && Self::after_epoch(date.since_epoch()) == date).then_some(date)
        };
        read().ok_or_else(|| DateError { found: text.to_owned() })
    }
}

impl Date {
    /// Today's date in UTC.
    pub fn today() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self::after_epoch((seconds / 86_400) as i64)
    }

    /// Howard Hinnant's algorithm: years begin in March, so that a leap day is the last.
    fn after_epoch(days: i64) -> Self {
        let days = days + 719_468;
        let era = days.div_euclid(146_097);
        let of_era = days.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * of_year + 2) / 153;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        Self {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month: month as u8,
            of_month: (of_year - (153 * from_march + 2) / 5 + 1) as u8,
        }
    }

    fn since_epoch(self) -> i64 {
        let year = self.year - i64::from(self.month <= 2);
        let era = year.div_euclid(400);
        let year_of_era = year.rem_euclid(400);
        let from_march = (i64::from(self.month) + 9) % 12;
        let of_year = (153 * from_march + 2) / 5 + i64::from(self.of_month) - 1;
        era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year - 719_468
    }

    /// `strftime` for dates; the time is midnight.
    pub(super) fn strftime(self, format: &str) -> String {
        const MONTHS: [&str; 12] = [
            "January",
            "February",
            "March",
            "April",
            "May",
            "June",
            "July",
            "August",
            "September",
            "October",
            "November",
            "December",
        ];
        const DAYS: [&str; 7] =
            ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
        let month = MONTHS[usize::from(self.month) - 1];
        let weekday = DAYS[self.since_epoch().rem_euclid(7) as usize];
        let mut out = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let Self { year, month: number, of_month: day } = self;
            match characters.next() {
                Some('Y') => out.push_str(&year.to_string()),
                Some('y') => out.push_str(&format!("{:02}", year % 100)),
                Some('m') => out.push_str(&format!("{number:02}")),
                Some('B') => out.push_str(month),
                Some('b' | 'h') => out.push_str(&month[..3]),
                Some('d') => out.push_str(&format!("{day:02}")),
                Some('e') => out.push_str(&format!("{day:2}")),
                Some('A') => out.push_str(weekday),
                Some('a') => out.push_str(&weekday[..3]),
                Some('j') => {
                    let first = Self { month: 1, of_month: 1, ..self };
                    out.push_str(&format!("{:03}", self.since_epoch() - first.since_epoch() + 1));
                }
                Some('F') => out.push_str(&format!("{year}-{number:02}-{day:02}")),
                Some('H' | 'M' | 'S') => out.push_str("00"),
                Some('I') => out.push_str("12"),
                Some('p') => out.push_str("AM"),
                Some('T') => out.push_str("00:00:00"),
                Some('%') | None => out.push('%'),
                // `%-d`: without leading zeros.
                Some('-') => {
                    let code = characters.next().map_or_else(String::new, |code| format!("%{code}"));
                    let padded = self.strftime(&code);
                    let bare = padded.trim_start_matches('0');
                    out.push_str(if bare.is_empty() && !padded.is_empty() { "0" } else { bare });
                }
                Some(other) => out.extend(['%', other]),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strftime_matches_python() {
        // Expected values from `datetime.date(...).strftime`.
        let all = "%d %b %Y|%A, %B %-d|%a %e %m/%y|%j|%F %H:%M:%S %I%p %%";
        for (day, shown) in [
            ("2024-07-26", "26 Jul 2024|Friday, July 26|Fri 26 07/24|208|2024-07-26 00:00:00 12AM %"),
            ("2024-02-29", "29 Feb 2024|Thursday, February 29|Thu 29 02/24|060|2024-02-29 00:00:00 12AM %"),
            ("1969-01-05", "05 Jan 1969|Sunday, January 5|Sun  5 01/69|005|1969-01-05 00:00:00 12AM %"),
        ] {
            assert_eq!(day.parse::<Date>().unwrap().strftime(all), shown);
        }
        for wrong in ["2023-02-29", "2024-13-01", "2024-00-01", "2024-01-00", "today", "", "2024-1"] {
            let error = wrong.parse::<Date>().unwrap_err().to_string();
            assert_eq!(error, format!("`{wrong}` is not a date: expected year-month-day, as in 2024-07-26"));
        }
        assert!(Date::today() > "2024-01-01".parse().unwrap());
    }
}
