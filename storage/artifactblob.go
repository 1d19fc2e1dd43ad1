package storage

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"go.podman.io/image/v5/pkg/blobinfocache/none"
	istorage "go.podman.io/image/v5/storage"
	"go.podman.io/image/v5/types"
	compression "go.podman.io/storage/pkg/archive"
)

const (
	// peeked is how much of a blob is looked at before it is unpacked: the largest block of zstd, and some.
	peeked = 192 << 10
	// zstdWindow is the most that a zstd stream may have the unpacking keep in memory: what zstd(1) takes, too.
	zstdWindow = 128 << 20
	tarBlock   = 512
)

// blobWriter writes a blob as the tar archive that its layer is made from.
type blobWriter struct {
	source *source
	blob   blob
	stall  *stallWatch
	// came is called with how many bytes of the blob have come by now.
	came func(bytes int64)
	// budget is what the archive may have.
	budget *budget
	// clear returns an error where a file of that name cannot be on the layers below.
	clear func(name string) error
}

// writeTo reads the blob from its source to the end. It returns nil only where the blob has the size and the digest that
// the manifest gives it.
func (w blobWriter) writeTo(ctx context.Context, out io.Writer) (err error) {
	var content io.ReadCloser
	w.stall.await(func() {
		// Without its URLs: the registry alone is asked.
		content, _, err = w.source.GetBlob(ctx, types.BlobInfo{Digest: w.blob.Digest, Size: w.blob.Size}, none.NoCache)
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, content.Close()) }()
	verified := &blobReader{content: content, blob: w.blob, verifier: w.blob.Digest.Verifier(), stall: w.stall, came: w.came}
	err = w.write(out, verified)
	return cmp.Or(verified.err, err) // the rest follows from it
}

// write writes what the blob's content is.
func (w blobWriter) write(out io.Writer, content io.Reader) error {
	if !w.blob.unpack {
		return w.writeFile(out, content)
	}
	head := bufio.NewReaderSize(content, peeked)
	begin, err := head.Peek(peeked)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if w.blob.name != "" && !beginsTar(begin) {
		return w.writeFile(out, head)
	}
	written := &writer{out: out}
	err = w.writeArchive(written, head)
	if err == nil || written.err != nil || w.budget.err != nil {
		return cmp.Or(written.err, err)
	}
	return fmt.Errorf("%w: blob %s: its media type %q is that of an archive, plain or compressed by gzip or zstd: %w: where it is none, say so in media_types",
		ErrInvalidArtifact, w.blob.Digest, w.blob.MediaType, err)
}

// writeFile writes an archive of one file and the directories on the way to it.
func (w blobWriter) writeFile(out io.Writer, content io.Reader) error {
	b := w.blob
	if err := w.clear(b.name); err != nil {
		return err
	}
	if err := w.budget.spend(b.Size); err != nil {
		return err
	}
	entries := tar.NewWriter(out)
	for dir := range parents(b.name) {
		if err := entries.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: time.Unix(0, 0)}); err != nil {
			return err
		}
	}
	if err := entries.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: b.name, Mode: b.mode, Size: b.Size, ModTime: b.mtime}); err != nil {
		return err
	}
	if _, err := io.CopyBuffer(entries, content, make([]byte, peeked)); err != nil {
		return err
	}
	return entries.Close()
}

// writeArchive writes the archive that the content is, unpacked.
func (w blobWriter) writeArchive(out io.Writer, content *bufio.Reader) error {
	plain, err := decompress(content)
	if err != nil {
		return err
	}
	defer plain.Close()
	copying := w.budget.spender(out, plain)
	if err := copying.files(); err != nil {
		return err
	}
	if err := copying.rest(); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, content) // what is behind a compressed stream
	return err
}

// writer remembers why it could not write.
type writer struct {
	out io.Writer
	err error
}

// Write writes p.
func (w *writer) Write(p []byte) (n int, err error) {
	n, w.err = w.out.Write(p)
	return n, w.err
}

// beginsTar tells whether content that begins so is a tar archive, plain or compressed.
func beginsTar(begin []byte) bool {
	plain, err := decompress(bytes.NewReader(begin))
	if err != nil {
		return false
	}
	defer plain.Close()
	header := make([]byte, tarBlock)
	if _, err := io.ReadFull(plain, header); err != nil {
		return false
	}
	// The checksum is of the header with blanks in its own place.
	const at, end = 148, 156
	want, err := strconv.ParseInt(strings.Trim(string(header[at:end]), " \x00"), 8, 64)
	sum := int64(0)
	for i, b := range header {
		if at <= i && i < end {
			b = ' '
		}
		sum += int64(b)
	}
	return err == nil && sum == want || !bytes.ContainsFunc(header, func(r rune) bool { return r != 0 })
}

// decompress returns what the content is without its compression, by gzip or zstd, if it has one.
func decompress(content io.Reader) (io.ReadCloser, error) {
	buffered := bufio.NewReader(content)
	begin, err := buffered.Peek(tarBlock)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch compression.DetectCompression(begin) {
	case compression.Gzip:
		return gzip.NewReader(buffered)
	case compression.Zstd:
		plain, err := zstd.NewReader(buffered, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return nil, err
		}
		return plain.IOReadCloser(), nil
	default:
		return io.NopCloser(buffered), nil
	}
}

// blobReader reads a blob, and ends with an error unless that has the size and the digest that its manifest gives.
type blobReader struct {
	content  io.Reader
	blob     blob
	verifier digest.Verifier
	stall    *stallWatch
	came     func(bytes int64)
	read     int64
	// err is why it could not be read.
	err error
}

// Read reads.
func (r *blobReader) Read(p []byte) (n int, err error) {
	r.stall.await(func() { n, err = r.content.Read(p) })
	if over := r.read + int64(n) - r.blob.Size; over > 0 {
		n, err = n-int(over), sizeFault(r.blob.Digest, r.blob.Size+over, r.blob.Size)
	}
	r.read += int64(n)
	_, _ = r.verifier.Write(p[:n]) // a hash takes all
	if n > 0 {
		r.came(r.read)
	}
	if errors.Is(err, io.EOF) {
		switch {
		case r.read < r.blob.Size:
			err = sizeFault(r.blob.Digest, r.read, r.blob.Size)
		case !r.verifier.Verified():
			err = fmt.Errorf("blob %s: %w", r.blob.Digest, istorage.ErrBlobDigestMismatch)
		default:
			return n, err
		}
	}
	r.err = err
	return n, err
}

// sizeFault returns an error unless a blob has as many bytes as its manifest says.
func sizeFault(blob digest.Digest, has, said int64) error {
	switch {
	case has > said:
		return fmt.Errorf("blob %s has more than %d bytes: %w", blob, said, istorage.ErrBlobSizeMismatch)
	case has < said:
		return fmt.Errorf("blob %s has %d bytes, and not %d: %w", blob, has, said, istorage.ErrBlobSizeMismatch)
	}
	return nil
}

// stallWatch calls stalled when something that is awaited takes too long.
type stallWatch struct {
	limit time.Duration
	timer *time.Timer
}

func newStallWatch(limit time.Duration, stalled func()) *stallWatch {
	w := &stallWatch{limit, time.AfterFunc(limit, stalled)}
	w.timer.Stop()
	return w
}

func (w *stallWatch) await(wait func()) {
	w.timer.Reset(w.limit)
	defer w.timer.Stop()
	wait()
}
