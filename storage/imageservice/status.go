package imageservice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	ispec "github.com/opencontainers/image-spec/specs-go/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ocihold/ocihold/storage"
)

// errUsers is returned, wrapped, where it would depend on the root which user an image has.
var errUsers = errors.New("the user depends on the handler")

// errNoImage is returned for a call that names no image.
var errNoImage = fmt.Errorf("%w: no image is named", storage.ErrInvalidReference)

// ImageStatus tells of one image; an absent one is no error. What it says beyond CRI's fields, when asked for it, is in
// CRI-O's form, with the image's handlers.
func (s *Service) ImageStatus(ctx context.Context, req *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error) {
	answer, err := s.status(ctx, req.GetImage())
	if err != nil {
		return nil, asStatus(err)
	}
	if answer.cri == nil {
		return &cri.ImageStatusResponse{}, nil
	}
	resp := &cri.ImageStatusResponse{Image: answer.cri}
	if req.GetVerbose() && answer.handlers != nil {
		info, err := json.Marshal(map[string]any{
			"labels": answer.config.Config.Labels, "imageSpec": answer.config, "handlers": answer.handlers,
		})
		if err != nil {
			return nil, asStatus(fmt.Errorf("encode the config of image %s: %w", answer.cri.GetId(), err))
		}
		resp.Info = map[string]string{"info": string(info)}
	}
	return resp, nil
}

// answer is what is known of an image. An absent one has no cri, and one that only CRI-O has no handlers.
type answer struct {
	cri      *cri.Image
	config   ispec.Image
	handlers []string
}

func (s *Service) status(ctx context.Context, spec *cri.ImageSpec) (answer, error) {
	if spec.GetImage() == "" {
		return answer{}, errNoImage
	}
	chosen, err := s.chooser.Load().choose(spec)
	if err != nil {
		return answer{}, err
	}
	found, err := s.find(ctx, spec, chosen)
	if err != nil {
		return answer{}, err
	}
	if len(found) == 0 {
		if narrow(spec) && chosen.root() != DefaultRoot {
			return answer{}, nil
		}
		return s.statusOfCRIO(ctx, spec)
	}
	return s.answer(ctx, found)
}

// find returns the images that spec means: in the chosen root, or, where the call is not about one, in each.
func (s *Service) find(ctx context.Context, spec *cri.ImageSpec, chosen choice) ([]storage.ImageAt, error) {
	if narrow(spec) {
		root, err := s.roots.Handler(chosen.root())
		if err != nil {
			return nil, err
		}
		image, err := storage.Bounded(root, func() (storage.Image, error) {
			image, err := root.Resolve(ctx, spec.GetImage())
			if err == nil && chosen.root() != DefaultRoot {
				// A pod is about to use it.
				err = root.MarkUsed(ctx, image.ID)
			}
			return image, err
		})
		if errors.Is(err, storage.ErrNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return []storage.ImageAt{{Image: image, Handlers: []string{chosen.root()}, Pinned: image.Leased}}, nil
	}
	found, err := s.roots.Find(ctx, spec.GetImage())
	if errors.Is(err, storage.ErrNotFound) {
		return nil, nil
	}
	return found, err
}

// answer returns the first of found, one image for each root that has one of that name, with what other roots add to it,
// provided that all have the same user.
func (s *Service) answer(ctx context.Context, found []storage.ImageAt) (answer, error) {
	var image storage.ImageAt
	var config ispec.Image
	var users []string
	differ := false
	for _, at := range found {
		its, err := s.config(ctx, at)
		if errors.Is(err, storage.ErrNotFound) || storage.IsAway(err) {
			continue // gone meanwhile
		}
		if err != nil {
			return answer{}, err
		}
		users = append(users, fmt.Sprintf("%q for %s", its.Config.User, strings.Join(at.Handlers, ", ")))
		switch image.ID {
		case "":
			image, config = at, its
		case at.ID:
			image = merge(image, at)
		default:
			differ = differ || runsAs(its) != runsAs(config)
		}
	}
	switch {
	case differ:
		return answer{}, fmt.Errorf("%w: it is %s: remove the image from all handlers but one, or ask for one with a runtime handler",
			errUsers, strings.Join(users, ", "))
	case image.ID == "":
		return answer{}, nil
	}
	return answer{s.criImage(image, config), config, image.Handlers}, nil
}

// merge returns what two roots say of one image.
func merge(a, b storage.ImageAt) storage.ImageAt {
	a.Names = slices.Compact(slices.Sorted(slices.Values(slices.Concat(a.Names, b.Names))))
	a.Digests = slices.Compact(slices.Sorted(slices.Values(slices.Concat(a.Digests, b.Digests))))
	a.Handlers = slices.Concat(a.Handlers, b.Handlers)
	a.Pinned = a.Pinned || b.Pinned
	return a
}

// runsAs is the user that an image runs as; none is root.
func runsAs(config ispec.Image) string {
	uid, name := user(config.Config.User)
	if name != "" {
		return name
	}
	return fmt.Sprint(uid.GetValue())
}

// statusOfCRIO asks CRI-O for an image that is in none of the roots that the question is for. While CRI-O is down, there
// is none.
func (s *Service) statusOfCRIO(ctx context.Context, spec *cri.ImageSpec) (answer, error) {
	resp, err := s.images.ImageStatus(ctx, &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: spec.GetImage()}})
	if isDown(err) {
		return answer{}, nil
	}
	if err != nil || resp.GetImage() == nil {
		return answer{}, err
	}
	// CRI-O sees the handlers' roots too.
	found, err := s.roots.Find(ctx, resp.GetImage().GetId())
	if err != nil && !errors.Is(err, storage.ErrNotFound) {
		return answer{}, err
	}
	switch {
	case len(found) == 0:
		return answer{cri: resp.GetImage()}, nil
	case narrow(spec) && !slices.Contains(found[0].Handlers, DefaultRoot):
		return answer{}, nil
	default:
		return s.answer(ctx, found)
	}
}
