package storage

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// PinRepository is what the names of pinned images begin with; a colon and the image's id follow. No registry is at that
// name. Only a CRI-O whose pinned_images have it takes such an image for pinned, and reports it to kubelet so.
const PinRepository = "in-use.ocihold.dev/pin"

func pinOf(imageID string) string { return PinRepository + ":" + imageID }

// unpinned are the names without a pin.
func unpinned(names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool { return strings.HasPrefix(name, PinRepository+":") })
}

// setPin gives the image its pin or takes it away. One that is not there has none.
func (r *Root) setPin(imageID string, pin bool) error {
	record, err := r.resolveID(imageID)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for the pin: %w", err)
	}
	switch has := slices.Contains(record.Names, pinOf(imageID)); {
	case has == pin:
		return nil
	case pin:
		err = r.store.AddNames(imageID, []string{pinOf(imageID)})
	default:
		err = r.store.RemoveNames(imageID, []string{pinOf(imageID)})
	}
	if err != nil {
		return fmt.Errorf("change the pin: %w", err)
	}
	return nil
}
