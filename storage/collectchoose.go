package storage

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/docker/go-units"
)

// GCPolicy says which images of a root a collection removes.
type GCPolicy struct {
	// High and Low are percents, of the file system or of MaxBytes. Above High, unused images go until Low.
	High, Low int
	// MaxBytes is what the root's images may take; 0 is no limit of their own. A root on the file system of CRI-O's own
	// has no marks then: kubelet counts its bytes and has its own.
	MaxBytes int64
	// MinAge is how long an image stays after its last use. The time of a pull that began by then does not count, nor does
	// as long again after its end: a pod may have waited for it before it uses the images that it has.
	MinAge time.Duration
	// MaxAge is after how long without use an image goes in any case; 0 is never.
	MaxAge time.Duration
	// Pinned tells of an image that it stays in any case; nil is none.
	Pinned func(Image) bool
}

// GCImage is what a collection does with an image, and why.
type GCImage struct {
	ID    string   `json:"id"`
	Names []string `json:"names"`
	// Bytes are all its layers on disk.
	Bytes uint64 `json:"bytes"`
	// Frees are the bytes that go with it, of layers that nothing else has then. 0 for one that stays.
	Frees uint64 `json:"frees"`
	// LastUsed is when it was last used, as far as that was seen.
	LastUsed time.Time `json:"last_used"`
	Goes     bool      `json:"goes"`
	Why      string    `json:"why"`
}

// shelf is a root's images, as a collection chooses from them.
type shelf struct {
	images []shelved
	bytes  map[string]uint64 // by layer
	uses   map[string]int    // how many images and others have a layer
}

// shelved is one image. stays says why it has to stay, and is empty where nothing is known that says so.
type shelved struct {
	GCImage

	layers []string
	stays  string
}

// choose returns what is to become of each image, least recently used first: enough of them go to free as many bytes as
// needed, and those that are too old.
func (s *shelf) choose(policy GCPolicy, need uint64, now, pulling time.Time) []GCImage {
	images := slices.Clone(s.images)
	slices.SortFunc(images, func(a, b shelved) int { return cmp.Or(a.LastUsed.Compare(b.LastUsed), cmp.Compare(a.ID, b.ID)) })
	rest := shelf{bytes: s.bytes, uses: maps.Clone(s.uses)}
	chosen := make([]GCImage, 0, len(images))
	var freed uint64
	for _, image := range images {
		age := now.Sub(image.LastUsed)
		switch {
		case image.stays != "":
			image.Why = image.stays
		case age < policy.MinAge:
			image.Why = "used within gc_min_age, " + units.HumanDuration(policy.MinAge)
		case pulling.Sub(image.LastUsed) < policy.MinAge:
			image.Why = "its pod may wait for a pull, or just have done so"
		case policy.MaxAge > 0 && age > policy.MaxAge:
			image.Goes, image.Why = true, "not used for gc_max_age, "+units.HumanDuration(policy.MaxAge)
		case freed < need:
			image.Goes, image.Why = true, fmt.Sprintf("least recently used, and the root is above gc_high, %d%%", policy.High)
		default:
			image.Why = "there is room"
		}
		if image.Goes {
			image.Frees = rest.take(image.layers)
			freed += image.Frees
		}
		chosen = append(chosen, image.GCImage)
	}
	return chosen
}

// take takes an image with these layers away and returns the bytes of those that nothing else has.
func (s *shelf) take(layers []string) (freed uint64) {
	for _, layer := range layers {
		if s.uses[layer]--; s.uses[layer] == 0 {
			freed += s.bytes[layer]
		}
	}
	return freed
}

// index returns where the image is.
func (s *shelf) index(imageID string) int {
	return slices.IndexFunc(s.images, func(i shelved) bool { return i.ID == imageID })
}
