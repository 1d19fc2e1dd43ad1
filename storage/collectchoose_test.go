package storage

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// shelfOf makes a shelf of images with layers of 10 bytes each.
func shelfOf(images ...shelved) *shelf {
	s := &shelf{images: images, bytes: map[string]uint64{}, uses: map[string]int{}}
	for i := range images {
		for _, layer := range images[i].layers {
			s.bytes[layer] = 10
			s.uses[layer]++
		}
	}
	return s
}

func TestChoose(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	image := func(id string, unused time.Duration, layers ...string) shelved {
		return shelved{GCImage: GCImage{ID: id, LastUsed: now.Add(-unused)}, layers: layers}
	}
	held := func(i shelved) shelved { i.stays = "leased"; return i }
	policy := GCPolicy{High: 85, Low: 80, MinAge: 2 * time.Minute}
	const low = "least recently used, and the root is above gc_high, 85%"
	for name, tc := range map[string]struct {
		images  []shelved
		maxAge  time.Duration
		need    uint64
		pulling time.Duration // how long
		want    []string
	}{
		"nothing is needed": {
			images: []shelved{image("a", time.Hour, "1"), image("b", 2*time.Hour, "2")},
			want:   []string{"b stays 0: there is room", "a stays 0: there is room"},
		},
		"least recently used first, and no more than needed": {
			images: []shelved{image("a", time.Hour, "1"), image("b", 3*time.Hour, "2"), image("c", 2*time.Hour, "3")},
			need:   11,
			want:   []string{"b goes 10: " + low, "c goes 10: " + low, "a stays 0: there is room"},
		},
		"held ones stay however old": {
			images: []shelved{held(image("a", 9*time.Hour, "1")), image("b", time.Hour, "2")},
			need:   20, maxAge: time.Minute,
			want: []string{"a stays 0: leased", "b goes 10: not used for gc_max_age, About a minute"},
		},
		"young ones stay however full": {
			images: []shelved{image("a", 119*time.Second, "1"), image("b", 120*time.Second, "2")},
			need:   20,
			want:   []string{"b goes 10: " + low, "a stays 0: used within gc_min_age, 2 minutes"},
		},
		"the time of a pull does not count": {
			images: []shelved{image("a", 61*time.Minute, "1"), image("b", 62*time.Minute, "2"), image("c", time.Minute, "3")},
			need:   30, pulling: time.Hour,
			want: []string{
				"b goes 10: " + low, "a stays 0: its pod may wait for a pull, or just have done so", "c stays 0: used within gc_min_age, 2 minutes",
			},
		},
		"too old goes though there is room": {
			images: []shelved{image("a", time.Hour, "1"), image("b", 25*time.Hour, "2"), image("c", 24*time.Hour, "3")},
			maxAge: 24 * time.Hour,
			want:   []string{"b goes 10: not used for gc_max_age, 24 hours", "c stays 0: there is room", "a stays 0: there is room"},
		},
		"what went for its age counts": {
			images: []shelved{image("a", time.Hour, "1"), image("b", 25*time.Hour, "2")},
			maxAge: 24 * time.Hour, need: 10,
			want: []string{"b goes 10: not used for gc_max_age, 24 hours", "a stays 0: there is room"},
		},
		"a shared layer goes with the last": {
			images: []shelved{image("a", 2*time.Hour, "base", "1"), image("b", time.Hour, "base"), image("c", time.Minute, "3")},
			need:   20,
			want:   []string{"a goes 10: " + low, "b goes 10: " + low, "c stays 0: used within gc_min_age, 2 minutes"},
		},
		"a layer of one that stays frees nothing": {
			images: []shelved{image("a", 2*time.Hour, "base"), held(image("b", time.Hour, "base"))},
			need:   10,
			want:   []string{"a goes 0: " + low, "b stays 0: leased"},
		},
		"at the same time, by id": {
			images: []shelved{image("b", time.Hour, "1"), image("a", time.Hour, "2")},
			need:   10,
			want:   []string{"a goes 10: " + low, "b stays 0: there is room"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			policy := policy
			policy.MaxAge = tc.maxAge
			var got []string
			for _, i := range shelfOf(tc.images...).choose(policy, tc.need, now, now.Add(-tc.pulling)) {
				what := "stays"
				if i.Goes {
					what = "goes"
				}
				got = append(got, fmt.Sprintf("%s %s %d: %s", i.ID, what, i.Frees, i.Why))
			}
			assert.Equal(t, tc.want, got)
		})
	}
}

// However images, clock and pulls are: none in use is chosen, none is chosen too many, and none is kept past the marks.
func TestChooseAnything(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	for round := range 5000 {
		now = now.Add(time.Duration(random.Int64N(int64(time.Hour))))
		pulling := now.Add(-time.Duration(random.Int64N(int64(20 * time.Minute))))
		policy := GCPolicy{High: 85, Low: 80, MinAge: time.Duration(random.Int64N(int64(time.Hour)))}
		if random.IntN(2) == 0 {
			policy.MaxAge = policy.MinAge + time.Duration(random.Int64N(int64(10*time.Hour)))
		}
		var images []shelved
		for i := range random.IntN(12) {
			image := shelved{GCImage: GCImage{ID: fmt.Sprint(i), LastUsed: now.Add(-time.Duration(random.Int64N(int64(12 * time.Hour))))}}
			for range random.IntN(4) {
				image.layers = union(image.layers, []string{fmt.Sprint(random.IntN(20))})
			}
			if random.IntN(4) == 0 {
				image.stays = "in use"
			}
			images = append(images, image)
		}
		need := uint64(random.IntN(200))
		s := shelfOf(images...)
		chosen := s.choose(policy, need, now, pulling)
		require.Len(t, chosen, len(images), "round %d", round)

		var freed, beforeLast uint64
		var lastForRoom *GCImage
		left := map[string]bool{}
		for i, image := range chosen {
			of := s.images[s.index(image.ID)]
			free := of.stays == "" && now.Sub(image.LastUsed) >= policy.MinAge && pulling.Sub(image.LastUsed) >= policy.MinAge
			old := policy.MaxAge > 0 && now.Sub(image.LastUsed) > policy.MaxAge
			switch {
			case image.Goes:
				require.True(t, free, "round %d: %+v", round, image)
				if !old {
					lastForRoom, beforeLast = &chosen[i], freed
				}
				freed += image.Frees
			case free:
				require.False(t, old, "round %d: %+v", round, image)
				require.GreaterOrEqual(t, freed, need, "round %d: %+v", round, image)
			}
			if !image.Goes {
				for _, layer := range of.layers {
					left[layer] = true
				}
			}
			require.NotEmpty(t, image.Why)
		}
		if lastForRoom != nil {
			require.Less(t, beforeLast, need, "round %d: %+v", round, *lastForRoom)
		}
		var kept uint64
		for layer := range left {
			kept += s.bytes[layer]
		}
		var all uint64
		for _, bytes := range s.bytes {
			all += bytes
		}
		require.Equal(t, all-kept, freed, "round %d", round)
	}
}

func TestToFree(t *testing.T) {
	for _, tc := range []struct {
		high, low            int
		capacity, used, want uint64
	}{
		{85, 80, 1000, 850, 0},
		{85, 80, 1000, 851, 51},
		{85, 80, 1000, 2000, 1200},
		{100, 80, 1000, 1000, 0},
		{1, 0, 1000, 11, 11},
		{85, 80, 0, 5, 0},
	} {
		assert.Equal(t, tc.want, toFree(GCPolicy{High: tc.high, Low: tc.low}, tc.capacity, tc.used), tc)
	}
}
