package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/test/images"
	"github.com/ocihold/ocihold/test/realnode"
)

// push makes an image of files, or the stack of layers that tests use, and puts
// it into the node's registry.
func push() *cobra.Command {
	var dir string
	var files []string
	var stack int
	var artifact bool
	cmd := &cobra.Command{Use: "push REF", Short: "Push an image made of files, and print its full name", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
		if artifact {
			return pushArtifact(cmd.Context(), dir, args[0], files)
		}
		var layers [][]images.Entry
		if stack > 0 {
			layers = images.Stack(stack)
		}
		for _, f := range files {
			entry, err := fileEntry(f)
			if err != nil {
				return err
			}
			layers = append(layers, []images.Entry{entry})
		}
		if len(layers) == 0 {
			return errors.New("nothing to push: give --file or --stack")
		}
		image, err := images.Image(images.Config{}, layers...)
		if err != nil {
			return err
		}
		return pushTo(cmd.Context(), dir, args[0], image)
	}}
	dirFlag(cmd, &dir)
	cmd.Flags().StringArrayVar(&files, "file", nil, "`PATH=SOURCE`: a layer with this file, executable if the source is (repeatable)")
	cmd.Flags().IntVar(&stack, "stack", 0, "`number` of layers with every kind of change between them")
	cmd.Flags().BoolVar(&artifact, "artifact", false, "push an OCI artifact, with each file as a blob of that title")
	return cmd
}

// pushTo puts content into the registry of the node in dir.
func pushTo(ctx context.Context, dir, ref string, content images.Pushable) error {
	n, err := realnode.Attach(dir)
	if err != nil {
		return err
	}
	defer n.Close()
	if err := n.Push(ctx, ref, content); err != nil {
		return err
	}
	fmt.Println(n.Ref(ref))
	return nil
}

func pushArtifact(ctx context.Context, dir, ref string, files []string) error {
	var blobs []images.Blob
	for _, f := range files {
		name, source, ok := strings.Cut(f, "=")
		if !ok {
			return fmt.Errorf("--file %s: it is PATH=SOURCE", f)
		}
		content, err := os.ReadFile(source)
		if err != nil {
			return err
		}
		blobs = append(blobs, images.Blob{MediaType: "application/octet-stream", Title: name, Content: content})
	}
	artifact, err := images.Artifact("application/vnd.test", blobs...)
	if err != nil {
		return err
	}
	return pushTo(ctx, dir, ref, artifact)
}

func fileEntry(arg string) (images.Entry, error) {
	name, source, ok := strings.Cut(arg, "=")
	if !ok {
		return images.Entry{}, fmt.Errorf("--file %s: it is PATH=SOURCE", arg)
	}
	info, err := os.Stat(source)
	if err != nil {
		return images.Entry{}, err
	}
	entry := images.File(name, "", int64(info.Mode().Perm()))
	entry.Size = info.Size()
	entry.Content = func() io.Reader {
		file, err := os.Open(source)
		if err != nil {
			return failing{err}
		}
		return file
	}
	return entry, nil
}

// failing is a reader that has only an error.
type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
