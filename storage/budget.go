package storage

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/docker/go-units"
	"github.com/opencontainers/go-digest"
)

// Limit is how many bytes an image may have. 0 is any number.
type Limit struct {
	Bytes int64
	// Setting is what an operator changes to change the limit; errors name it.
	Setting string
}

func (l Limit) String() string { return units.HumanSize(float64(l.Bytes)) }

// SetLimits says how large images may be, unpacked, that come into a root from now on, in addition to what a pull's own
// options say. Layers that the root has already count with those that come. It returns ErrUnknownHandler.
func (r *Roots) SetLimits(handler string, limits ...Limit) error {
	if handler == r.base.name {
		r.base.limits.Store(&limits)
		return nil
	}
	for _, h := range r.handlers {
		if h.options.Name == handler {
			h.limits.Store(&limits)
			return nil
		}
	}
	return fmt.Errorf("limit images: %w %q: there are %s", ErrUnknownHandler, handler, strings.Join(r.Names(), ", "))
}

// limitsOf are the limits for what comes from the source.
func (r *Root) limitsOf(src *source) (limits []Limit) {
	if set := r.limits.Load(); set != nil {
		limits = append(limits, *set...)
	}
	if src.artifact != nil {
		limits = append(limits, r.artifactLimit)
	}
	return append(limits, src.limit)
}

// roomStep is how many bytes are written between two looks for the room that is left: at most some hundred files.
const roomStep = 256 << 10

// budget is how many bytes an image may have in the root that it is unpacked into, and has.
type budget struct {
	limits []Limit
	// room says what is free where the root is. nil is room for anything.
	room func() (room, error)
	// blob is the one that is unpacked.
	blob digest.Digest

	spent, looked int64
	// err is why no more may come.
	err error
}

// budget returns that of an image from the source.
func (r *Root) budget(src *source) *budget {
	return &budget{limits: r.limitsOf(src), room: func() (room, error) { return roomIn(filepath.Dir(r.homes()[0])) }}
}

// allow returns ErrTooLarge where so many more bytes are too many, and ErrDiskFull where there is no room for them.
func (b *budget) allow(bytes int64) error {
	if err := b.limit(bytes); err != nil || b.room == nil || bytes < roomStep-(b.spent-b.looked) {
		return err
	}
	b.looked = b.spent
	left, err := b.room()
	switch {
	case err != nil:
		b.err = err
	case left.scarce() || uint64(bytes) > left.available-reserveBytes: //nolint:gosec // more than roomStep, which is not negative
		b.err = fmt.Errorf("%w: layer %s, unpacked, would fill the disk of the root, which has %s left: make room there",
			ErrDiskFull, b.blob, units.HumanSize(float64(left.available)))
	}
	return b.err
}

// limit is allow without a look for room.
func (b *budget) limit(bytes int64) error {
	if b.err != nil {
		return b.err
	}
	least := Limit{}
	for _, l := range b.limits {
		if l.Bytes > 0 && (least.Bytes == 0 || l.Bytes < least.Bytes) {
			least = l
		}
	}
	if least.Bytes > 0 && bytes > least.Bytes-b.spent {
		b.err = fmt.Errorf("%s: %w: with layer %s it has more than %s, unpacked", least.Setting, ErrTooLarge, b.blob, least)
	}
	return b.err
}

func (b *budget) spend(bytes int64) error {
	if err := b.allow(bytes); err != nil {
		return err
	}
	b.spent += bytes
	return nil
}

// start has the next bytes be of that blob, whose image has so many that are in the root.
func (b *budget) start(blob digest.Digest, spent int64) {
	b.blob, b.spent, b.looked = blob, spent, spent
}

// spender copies a tar archive and spends what it has. Its last read is held back from the copy: a file with holes is as
// large as its header says without another byte, so that nobody may have that before it is allowed.
type spender struct {
	budget *budget
	from   io.Reader
	to     *bufio.Writer
	held   []byte
	read   int64
}

func (b *budget) spender(to io.Writer, from io.Reader) *spender {
	return &spender{budget: b, from: from, to: bufio.NewWriterSize(to, copied)}
}

// copied is how many bytes are copied at a time.
const copied = 64 << 10

// Read reads what is to be copied.
func (s *spender) Read(p []byte) (int, error) {
	n, err := s.from.Read(p)
	if over := s.budget.spend(int64(n)); over != nil {
		return 0, over
	}
	if n > 0 {
		if _, err := s.to.Write(s.held); err != nil {
			return 0, err
		}
		s.held, s.read = append(s.held[:0], p[:n]...), s.read+int64(n)
	}
	return n, err
}

// files copies to the end of the archive, and also spends what its files have that are larger than they are in there:
// those with holes.
func (s *spender) files() error {
	entries := tar.NewReader(s)
	for files := int64(0); ; {
		entry, err := entries.Next()
		if holes := files - s.read; holes > 0 {
			files -= holes
			if err := s.budget.spend(holes); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := s.budget.allow(entry.Size); err != nil {
			return err
		}
		files += entry.Size
	}
}

// rest copies what is left.
func (s *spender) rest() error {
	if _, err := io.Copy(io.Discard, s); err != nil {
		return err
	}
	if _, err := s.to.Write(s.held); err != nil {
		return err
	}
	return s.to.Flush()
}
