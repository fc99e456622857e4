//! A Parquet file whose pages are bounded: each says in its header how large it is, before it is decompressed, and in its
//! levels how many values each row has, before they are decoded.

use std::fs::File;
use std::io::{BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use parquet::basic::Type;
use parquet::bloom_filter::Sbbf;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::{ChunkReader, FileReader, Length, RowGroupReader, SerializedPageReader};
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type as SchemaType;

use super::parquet_row_sizes::{ParquetRowSizes, take_varint};

/// The largest page, decompressed.
const MAX_PAGE_BYTES: u64 = 256 << 20;
/// The largest pages of all columns together: one of each is in memory, and its dictionary.
const MAX_PAGES_BYTES: u64 = 512 << 20;

/// A page that is too large, or too large beside those of other columns.
#[derive(Debug, thiserror::Error)]
#[error("a page of {bytes} bytes")]
pub(super) struct LargePage {
    pub(super) column: String,
    pub(super) bytes: u64,
}

/// A file with bounded pages.
pub(super) struct BoundedFile {
    inner: SerializedFileReader<File>,
    file: File,
    /// Bytes of the pages in memory.
    in_memory: Arc<AtomicU64>,
}

impl BoundedFile {
    pub(super) fn new(file: File) -> Result<Self> {
        let inner = SerializedFileReader::new(file.try_clone()?)?;
        Ok(Self { inner, file, in_memory: Arc::default() })
    }
}

impl FileReader for BoundedFile {
    fn metadata(&self) -> &ParquetMetaData {
        self.inner.metadata()
    }

    fn num_row_groups(&self) -> usize {
        self.inner.num_row_groups()
    }

    fn get_row_group(&self, number: usize) -> Result<Box<dyn RowGroupReader + '_>> {
        let before = self.metadata().row_groups().iter().take(number).map(RowGroupMetaData::num_rows);
        let rows_before = before.filter_map(|rows| u64::try_from(rows).ok()).fold(0, u64::saturating_add);
        Ok(Box::new(BoundedRowGroup { of: self, inner: self.inner.get_row_group(number)?, rows_before }))
    }

    fn get_row_iter(&self, projection: Option<SchemaType>) -> Result<RowIter<'_>> {
        RowIter::from_file(projection, self)
    }
}

struct BoundedRowGroup<'a> {
    of: &'a BoundedFile,
    inner: Box<dyn RowGroupReader + 'a>,
    rows_before: u64,
}

impl RowGroupReader for BoundedRowGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.inner.metadata()
    }

    fn num_columns(&self) -> usize {
        self.inner.num_columns()
    }

    fn get_column_page_reader(&self, number: usize) -> Result<Box<dyn PageReader>> {
        let column = self.metadata().column(number);
        let source = PageSource {
            file: self.of.file.try_clone()?,
            in_memory: Arc::clone(&self.of.in_memory),
            column: column.column_path().string(),
            is_after_header: AtomicBool::new(false),
        };
        let source = Arc::new(source);
        let rows = usize::try_from(self.metadata().num_rows())?;
        Ok(Box::new(BoundedPages {
            inner: SerializedPageReader::new(Arc::clone(&source), column, rows, None)?,
            source,
            is_peeked: false,
            physical_type: column.column_type(),
            rows: ParquetRowSizes::new(column.column_descr(), self.rows_before),
            bytes: [0; 2],
        }))
    }

    fn get_column_bloom_filter(&self, number: usize) -> Option<&Sbbf> {
        self.inner.get_column_bloom_filter(number)
    }

    fn get_row_iter(&self, projection: Option<SchemaType>) -> Result<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}

/// The bytes of a column. Readers ask it for a stream where a page's header begins, or where it ends if they have read it.
struct PageSource {
    file: File,
    in_memory: Arc<AtomicU64>,
    column: String,
    /// Whether the next stream begins after a header.
    is_after_header: AtomicBool,
}

impl Length for PageSource {
    fn len(&self) -> u64 {
        Length::len(&self.file)
    }
}

impl ChunkReader for PageSource {
    type T = BufReader<File>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        // Relaxed, as below: one thread reads all columns.
        if self.is_after_header.swap(false, Ordering::Relaxed) {
            return self.file.get_read(start);
        }
        let mut beginning = Vec::new();
        self.file.get_read(start)?.take(24).read_to_end(&mut beginning)?;
        let bytes = page_bytes(&beginning)
            .ok_or_else(|| ParquetError::General("a page header without the size of its page".to_owned()))?;
        if bytes > MAX_PAGE_BYTES || bytes + self.in_memory.load(Ordering::Relaxed) > MAX_PAGES_BYTES {
            return Err(ParquetError::External(Box::new(LargePage { column: self.column.clone(), bytes })));
        }
        self.file.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        self.file.get_bytes(start, length)
    }
}

/// The size of a page, decompressed, from the first fields of its header in Thrift's compact protocol: its type, this size, and
/// the compressed one. All writers write them in this order.
fn page_bytes(header: &[u8]) -> Option<u64> {
    const NEXT_FIELD_I32: u8 = 0x15;
    let mut rest = header;
    let mut field = || {
        let (kind, after) = rest.split_first()?;
        rest = after;
        (*kind == NEXT_FIELD_I32).then_some(())?;
        // Zigzag: negative sizes are odd, and the parser's to report.
        Some(take_varint(&mut rest)? >> 1)
    };
    field().and_then(|_| field())
}

/// The pages of a column.
struct BoundedPages {
    inner: SerializedPageReader<PageSource>,
    source: Arc<PageSource>,
    /// Whether the header of the next page was read.
    is_peeked: bool,
    physical_type: Type,
    rows: ParquetRowSizes,
    /// Bytes of the dictionary and of the last page.
    bytes: [u64; 2],
}

impl PageReader for BoundedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        self.source.is_after_header.store(self.is_peeked, Ordering::Relaxed);
        self.is_peeked = false;
        let page = self.inner.get_next_page()?;
        if let Some(page) = &page {
            let kept = &mut self.bytes[usize::from(page.is_data_page())];
            let bytes = page.buffer().len() as u64;
            let in_memory = &self.source.in_memory;
            in_memory.fetch_add(bytes, Ordering::Relaxed);
            in_memory.fetch_sub(std::mem::replace(kept, bytes), Ordering::Relaxed);
            let counted = self.rows.count(page, self.physical_type);
            counted.map_err(|large| ParquetError::External(Box::new(large)))?;
        }
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        let found = self.inner.peek_next_page()?;
        self.is_peeked = found.is_some();
        Ok(found)
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.is_peeked = false;
        self.inner.skip_next_page()
    }
}

impl Iterator for BoundedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Result<Page>> {
        self.get_next_page().transpose()
    }
}

impl Drop for BoundedPages {
    fn drop(&mut self) {
        self.source.in_memory.fetch_sub(self.bytes.iter().sum(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_begin_with_the_sizes_of_the_page() {
        // A data page of 300 bytes, 20 of them compressed.
        assert_eq!(page_bytes(&[0x15, 0, 0x15, 0xD8, 0x04, 0x15, 40]), Some(300));
        assert_eq!(page_bytes(&[0x15, 0, 0x15, 0xD8]), None);
        assert_eq!(page_bytes(&[0x2C, 0, 0x15, 0xD8, 0x04]), None);
        assert_eq!(page_bytes(&[]), None);
    }
}
