package storage

import (
	"bufio"
	"errors"
	"io"
	"sync"

	"github.com/klauspost/compress/gzip"
	"github.com/opencontainers/go-digest"
	cstorage "go.podman.io/storage"
	compression "go.podman.io/storage/pkg/archive"
)

// boundStore is a root's store for the transfer of one image, which unpacks no more than the budget has.
type boundStore struct {
	cstorage.Store

	budget *budget
	// blobs are the sizes that the manifest gives.
	blobs map[digest.Digest]int64
	// sizes are those of the layers made, unpacked.
	sizes map[string]int64
	// top is the highest layer of the image that is there.
	top string
}

func (r *Root) boundStore(src *source) *boundStore {
	s := &boundStore{Store: r.store, budget: r.budget(src), blobs: map[digest.Digest]int64{}, sizes: map[string]int64{}}
	for _, l := range src.layers {
		if l.Size >= 0 {
			s.blobs[l.Digest] = l.Size
		}
	}
	return s
}

// PutLayer makes a layer of an archive. It is the library's only way to bring one in, as the root does not take parts of
// layers from elsewhere (enable_partial_images), and it is called for one layer at a time.
func (s *boundStore) PutLayer(
	id, parent string, names []string, mountLabel string, writeable bool, options *cstorage.LayerOptions, content io.Reader,
) (*cstorage.Layer, int64, error) {
	below, err := s.sizeOf(parent)
	if err != nil {
		return nil, -1, err
	}
	s.top = parent
	s.budget.start(options.OriginalDigest, below)
	read := &countingReader{content: content}
	bound := *options
	check := func() error { return nil }
	if bound.OriginalSize == nil { // else it is what another layer has
		if size, ok := s.blobs[bound.OriginalDigest]; ok {
			check = func() error { return sizeFault(bound.OriginalDigest, read.bytes, size) }
		}
		bound.OriginalSize = &read.bytes // which the store could not count
	}
	plain, stream := io.Pipe()
	var unpacking sync.WaitGroup
	unpacking.Go(func() { stream.CloseWithError(s.unpack(read, check, stream)) })
	layer, size, err := s.Store.PutLayer(id, parent, names, mountLabel, writeable, &bound, plain)
	_ = plain.Close() // it never fails
	unpacking.Wait()
	if s.budget.err != nil {
		return nil, -1, s.budget.err
	}
	if err == nil {
		s.top, s.sizes[id] = id, s.budget.spent-below
	}
	return layer, size, err
}

// unpack writes the archive without its compression, and then calls check. What is wrong with the archive the reader sees.
func (s *boundStore) unpack(content io.Reader, check func() error, out io.Writer) (err error) {
	plain, err := compression.DecompressStream(content)
	if err != nil {
		return err
	}
	defer plain.Close()
	begun := bufio.NewReader(plain)
	begin, err := begun.Peek(tarBlock)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if compression.DetectCompression(begin) != compression.Uncompressed {
		// The store would unpack once more: it gets a compression to remove.
		stored, _ := gzip.NewWriterLevel(out, gzip.NoCompression) // a level that there is
		defer func() { err = errors.Join(err, stored.Close()) }()
		out = stored
	}
	copying := s.budget.spender(out, begun)
	if err := copying.files(); s.budget.err != nil {
		return err
	}
	if err := copying.rest(); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, content); err != nil { // what is behind a compressed stream
		return err
	}
	return check()
}

// sizeOf adds up the layer and those below it, unpacked.
func (s *boundStore) sizeOf(id string) (total int64, err error) {
	for id != "" {
		layer, err := s.Layer(id)
		if err != nil {
			return 0, err
		}
		size, made := s.sizes[layer.ID]
		if !made {
			size = max(0, layer.UncompressedSize)
		}
		total, id = total+size, layer.Parent
	}
	return total, nil
}

// countingReader counts what it reads.
type countingReader struct {
	content io.Reader
	bytes   int64
}

// Read reads.
func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.content.Read(p)
	r.bytes += int64(n)
	return n, err
}
