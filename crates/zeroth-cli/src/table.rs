//! Tables for people: columns as wide as their widest cell.

use crate::plain::one_line;

/// Rows of cells under a head.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    /// Columns whose cells end at the right: figures.
    right: Vec<usize>,
}

impl Table {
    /// A table with this head; the columns named in `right` hold figures.
    pub(crate) fn new(head: &[&str], right: &[usize]) -> Self {
        Self { rows: vec![head.iter().map(|cell| (*cell).to_owned()).collect()], right: right.to_vec() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| one_line(&cell)).collect());
    }

    /// The lines, head first, each with its line end.
    pub(crate) fn lines(&self) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells: Vec<String> = row
                .iter()
                .enumerate()
                .map(|(column, cell)| {
                    let blank = " ".repeat(widths[column] - cell.chars().count());
                    if self.right.contains(&column) {
                        format!("{blank}{cell}")
                    } else {
                        format!("{cell}{blank}")
                    }
                })
                .collect();
            format!("{}\n", cells.join("  ").trim_end())
        };
        self.rows.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_end_at_the_right_and_words_begin_at_the_left() {
        let mut table = Table::new(&["preset", "bytes"], &[1]);
        table.row(["zero2".to_owned(), "32 GB".to_owned()]);
        table.row(["zero2_offload".to_owned(), "9 GB".to_owned()]);
        assert_eq!(
            table.lines().concat(),
            "preset         bytes\nzero2          32 GB\nzero2_offload   9 GB\n"
        );
    }
}
