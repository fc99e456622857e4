//! Text tables with aligned columns.

use crate::sanitize::one_line;

/// Rows of cells under a header.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    /// Right-aligned columns.
    right: Vec<usize>,
}

impl Table {
    /// A table with this header; the columns in `right` are right-aligned.
    pub(crate) fn new(head: &[&str], right: &[usize]) -> Self {
        Self { rows: vec![head.iter().map(|cell| (*cell).to_owned()).collect()], right: right.to_vec() }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| one_line(&cell)).collect());
    }

    /// The lines, header first, each with a newline.
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
    fn numbers_are_right_aligned() {
        let mut table = Table::new(&["preset", "bytes"], &[1]);
        table.row(["zero2".to_owned(), "32 GB".to_owned()]);
        table.row(["zero2_offload".to_owned(), "9 GB".to_owned()]);
        assert_eq!(
            table.lines().concat(),
            "preset         bytes\nzero2          32 GB\nzero2_offload   9 GB\n"
        );
    }
}
